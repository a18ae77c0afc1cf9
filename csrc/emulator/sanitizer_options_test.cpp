// What the sanitizers are told, in this program and in those that it starts.

#if defined(__SANITIZE_THREAD__)

// By default a program with threads sleeps for a second before it ends. The runtime of
// the sanitizer is a library of its own, which has to see it.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "atexit_sleep_ms=20";
}

#endif
