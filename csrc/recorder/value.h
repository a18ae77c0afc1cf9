// Value: a tree of numbers, texts, lists and dictionaries, to be written as JSON or as
// a pickle.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace weightsync::recorder {

class Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;  // in this order

class Value {
 public:
  Value() = default;  // nothing
  Value(bool value) : held_(value) {}
  Value(std::int64_t value) : held_(value) {}
  Value(int value) : held_(std::int64_t{value}) {}
  Value(double value) : held_(value) {}
  Value(std::string value) : held_(std::move(value)) {}
  Value(const char* value) : held_(std::string(value)) {}
  Value(List value) : held_(std::move(value)) {}
  Value(Dict value) : held_(std::move(value)) {}

  using Held =
      std::variant<std::monostate, bool, std::int64_t, double, std::string, List, Dict>;
  const Held& held() const { return held_; }

 private:
  Held held_;
};

std::string to_json(const Value& value);
// Protocol 2 of Python's pickle, with nothing in it but the above: reading it calls no
// code.
std::string to_pickle(const Value& value);

}  // namespace weightsync::recorder
