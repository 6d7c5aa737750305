// The list of the records that Python shares with C++; layouts.h says what for.
#include "layouts.h"

#include <string>

namespace {

std::string& list() {
  static std::string text;
  return text;
}

}  // namespace

namespace layouts {

Layout::Layout(const char* name, size_t size, std::initializer_list<Field> fields) {
  std::string& text = list();
  text += name + (' ' + std::to_string(size));
  for (const Field& field : fields)
    text += ' ' + (field.name + (':' + std::to_string(field.offset))) + ':' +
            std::to_string(field.size) + ':' + field.kind;
  text += '\n';
}

}  // namespace layouts

// A line for each record: its name, its size, and name:offset:size:kind of each field, in order.
extern "C" const char* moe_layouts() { return list().c_str(); }
