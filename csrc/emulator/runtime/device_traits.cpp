#include "emulator/device_traits.h"

#include <cstdio>
#include <cstdlib>
#include <map>

#include "configuration.h"

namespace weightsync::emulator {
namespace {

// Numbers of an H100, so that programs that size themselves by the device behave as
// they do on hardware. What the emulator does not do is absent: 0.
const std::map<int, int>& attributes() {
  static const auto* const table = new std::map<int, int>{
      {1, 1024},               // threads of a block
      {2, 1024},               // block x
      {3, 1024},               // block y
      {4, 64},                 // block z
      {5, 2147483647},         // grid x
      {6, 65535},              // grid y
      {7, 65535},              // grid z
      {8, 49152},              // shared memory of a block
      {9, 65536},              // constant memory
      {10, 32},                // warp
      {11, 2147483647},        // pitch
      {12, 65536},             // registers of a block
      {13, 1980000},           // clock, kHz
      {14, 512},               // alignment of textures
      {15, 1},                 // copies beside kernels
      {16, kMultiprocessors},  //
      {19, 1},                 // maps host memory
      {31, 1},                 // concurrent kernels
      {36, 2619000},           // memory clock, kHz
      {37, 5120},              // memory bus, bits
      {38, 52428800},          // L2
      {39, 2048},              // threads of a multiprocessor
      {40, 3},                 // copy engines
      {41, 1},                 // unified addressing
      {51, 32},                // alignment of pitches
      {75, kCapabilityMajor},  //
      {76, kCapabilityMinor},  //
      {78, 1},                 // stream priorities
      {79, 1},                 // global L1
      {80, 1},                 // local L1
      {81, 233472},            // shared memory of a multiprocessor
      {82, 65536},             // registers of a multiprocessor
      {83, 1},                 // managed memory
      {91, 1},                 // host pointers of registered memory are usable
      {92, 1},                 // waits and writes of values by streams
      {93, 1},                 // of 64 bits
      {94, 1},                 // wait for NOR
      {95, 1},                 // cooperative launch
      {97, 232448},            // shared memory of a block that asks for it
      {99, 1},                 // host registration
      {102, 1},                // virtual memory management
      {103, 1},                // its handles as POSIX descriptors
      {106, 32},               // blocks of a multiprocessor
      {111, 1024},             // shared memory reserved of a block
      {115, 1},                // memory pools
      {120, 1},                // clusters
      {122, 1},                // waits and writes of values, second version
      {125, 1},                // interprocess events
      {126, 4},                // memory sync domains
      {134, -1},               // NUMA node of the host
  };
  return *table;
}

constexpr int kFirstBus = 1;

}  // namespace

int device_attribute(int device, int attribute) {
  constexpr int kPciBus = 33;
  if (attribute == kPciBus) return physical_device_bus(physical_device(device));
  const auto found = attributes().find(attribute);
  return found == attributes().end() ? 0 : found->second;
}

std::string pci_bus_id(int device) {
  char text[16];
  std::snprintf(text, sizeof text, "0000:%02X:00.0",
                physical_device_bus(physical_device(device)));
  return text;
}

int device_of_bus_id(const std::string& id) {
  for (int device = 0; device < device_count(); ++device) {
    if (pci_bus_id(device) == id) return device;
  }
  return -1;
}

std::array<char, 16> device_uuid(int device) {
  return physical_device_uuid(physical_device(device));
}

int physical_device_count() {
  const char* const devices = std::getenv("WEIGHTSYNC_EMULATOR_GPUS");
  return static_cast<int>(read_configuration(devices, nullptr, nullptr).devices.size());
}

std::array<char, 16> physical_device_uuid(int physical) {
  std::array<char, 16> uuid{'w', 'e', 'i', 'g', 'h', 't', 's', 'y', 'n', 'c'};
  uuid.back() = static_cast<char>(physical);
  return uuid;
}

int physical_device_bus(int physical) { return physical + kFirstBus; }

}  // namespace weightsync::emulator
