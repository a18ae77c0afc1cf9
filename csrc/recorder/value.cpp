#include "recorder/value.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace weightsync::recorder {
namespace {

using Held = Value::Held;

class Json {
 public:
  void write(const Value& value) {
    std::visit([this](const auto& held) { put(held); }, value.held());
  }
  std::string take() { return std::move(text_); }

 private:
  void put(std::monostate) { text_ += "null"; }
  void put(bool value) { text_ += value ? "true" : "false"; }
  void put(std::int64_t value) { text_ += std::to_string(value); }
  void put(double value) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    text_ += std::isfinite(value) ? digits : "null";
  }
  void put(const std::string& value) {
    text_ += '"';
    for (const char each : value) put_character(each);
    text_ += '"';
  }
  void put_character(char each) {
    if (each == '"' || each == '\\') {
      text_ += '\\';
      text_ += each;
    } else if (static_cast<unsigned char>(each) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(each));
      text_ += escaped;
    } else {
      text_ += each;
    }
  }
  void put(const List& list) {
    text_ += '[';
    const char* between = "";
    for (const Value& each : list) {
      text_ += between;
      write(each);
      between = ",";
    }
    text_ += ']';
  }
  void put(const Dict& dict) {
    text_ += '{';
    const char* between = "";
    for (const auto& [key, each] : dict) {
      text_ += between;
      put(key);
      text_ += ':';
      write(each);
      between = ",";
    }
    text_ += '}';
  }

  std::string text_;
};

class Pickle {
 public:
  Pickle() : bytes_("\x80\x02") {}
  void write(const Value& value) {
    std::visit([this](const auto& held) { put(held); }, value.held());
  }
  std::string take() {
    bytes_ += '.';
    return std::move(bytes_);
  }

 private:
  template <class Number>
  void put_little_endian(Number number) {
    for (std::size_t each = 0; each < sizeof number; ++each) {
      bytes_ += static_cast<char>(static_cast<std::uint64_t>(number) >> (8 * each));
    }
  }

  void put(std::monostate) { bytes_ += 'N'; }
  void put(bool value) { bytes_ += value ? '\x88' : '\x89'; }
  void put(std::int64_t value) {
    if (value == static_cast<std::int32_t>(value)) {
      bytes_ += 'J';
      put_little_endian(static_cast<std::int32_t>(value));
    } else {
      bytes_ += "\x8a\x08";  // LONG1 of eight bytes
      put_little_endian(value);
    }
  }
  void put(double value) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    bytes_ += 'G';
    for (int shift = 56; shift >= 0; shift -= 8) {
      bytes_ += static_cast<char>(bits >> shift);
    }
  }
  void put(const std::string& value) {
    bytes_ += 'X';
    put_little_endian(static_cast<std::uint32_t>(value.size()));
    bytes_ += value;
  }
  void put(const List& list) {
    bytes_ += "](";
    for (const Value& each : list) write(each);
    bytes_ += 'e';
  }
  void put(const Dict& dict) {
    bytes_ += "}(";
    for (const auto& [key, each] : dict) {
      put(key);
      write(each);
    }
    bytes_ += 'u';
  }

  std::string bytes_;
};

}  // namespace

std::string to_json(const Value& value) {
  Json json;
  json.write(value);
  return json.take();
}

std::string to_pickle(const Value& value) {
  Pickle pickle;
  pickle.write(value);
  return pickle.take();
}

}  // namespace weightsync::recorder
