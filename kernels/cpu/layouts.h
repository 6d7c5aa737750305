// The memory layout of every record that Python shares with C++, as the compiler has laid it out.
//
// LAYOUT(Type, all, its, fields) stands once for each record, in a source that uses it. It does not
// compile if a field is missing. `moe_layouts` lists the layouts, and kernels/cpu/interface.py
// compares them with the ctypes structures whenever it loads the library.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace layouts {

struct Field {
  const char* name;
  size_t offset, size;
  char kind;  // p: pointer, f: floating point, i: integer, r: record or array
};

// Adds a record to the list that `moe_layouts` returns.
struct Layout {
  Layout(const char* name, size_t size, std::initializer_list<Field> fields);
};

template <class T>
constexpr char kind() {
  if (std::is_pointer_v<T>) return 'p';
  if (std::is_floating_point_v<T>) return 'f';
  constexpr bool atomic =
      std::is_same_v<T, std::atomic<int32_t>> || std::is_same_v<T, std::atomic<int64_t>>;
  return std::is_integral_v<T> || atomic ? 'i' : 'r';
}

}  // namespace layouts

#define LAYOUT_FIELDS(Type, name, ...)                                                         \
  {#name, offsetof(Type, name), sizeof(Type::name), layouts::kind<decltype(Type::name)>()},    \
      __VA_OPT__(LAYOUT_REST LAYOUT_EMPTY()(Type, __VA_ARGS__))
#define LAYOUT_REST() LAYOUT_FIELDS
#define LAYOUT_EMPTY() ()
// The preprocessor expands one more field each time that it reads the list again: up to 64 times.
#define LAYOUT_READ(...) LAYOUT_READ4(LAYOUT_READ4(LAYOUT_READ4(LAYOUT_READ4(__VA_ARGS__))))
#define LAYOUT_READ4(...) LAYOUT_READ16(LAYOUT_READ16(LAYOUT_READ16(LAYOUT_READ16(__VA_ARGS__))))
#define LAYOUT_READ16(...) LAYOUT_READ64(LAYOUT_READ64(LAYOUT_READ64(__VA_ARGS__)))
#define LAYOUT_READ64(...) __VA_ARGS__

#define LAYOUT_JOIN(a, b) a##b
#define LAYOUT_NAME(line) LAYOUT_JOIN(layout_, line)
#define LAYOUT(Type, ...)                                                                      \
  namespace {                                                                                  \
  [[maybe_unused]] void all_fields(Type& record) {                                             \
    [[maybe_unused]] auto& [__VA_ARGS__] = record;                                             \
  }                                                                                            \
  const layouts::Layout LAYOUT_NAME(__LINE__)(#Type, sizeof(Type),                             \
                                              {LAYOUT_READ(LAYOUT_FIELDS(Type, __VA_ARGS__))}); \
  }
