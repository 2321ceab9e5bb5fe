// What Python is told of the library, of which it declares nothing again: functions, and the fields of the structs that it
// makes. Each is told where it is defined (api.h); here are those that several functions or operations share.
#include "api.h"
#include "lora.h"

namespace quire {

std::vector<Field>& told_fields() {
    static std::vector<Field> fields;
    return fields;
}

std::vector<std::string>& told_functions() {
    static std::vector<std::string> functions;
    return functions;
}

bool tell(std::initializer_list<Field> of_struct) {
    told_fields().insert(told_fields().end(), of_struct);
    return true;
}

namespace {

QUIRE_STRUCT(Matrix, QUIRE_FIELD(data), QUIRE_FIELD(scales), QUIRE_FIELD(rows), QUIRE_FIELD(cols), QUIRE_FIELD(type), QUIRE_FIELD(paired));
QUIRE_STRUCT(HeadSpec, QUIRE_FIELD(num_heads), QUIRE_FIELD(num_kv_heads), QUIRE_FIELD(head_dim), QUIRE_FIELD(layer), QUIRE_FIELD(group));
QUIRE_STRUCT(LoraPart, QUIRE_FIELD(a), QUIRE_FIELD(b), QUIRE_FIELD(rank), QUIRE_FIELD(first), QUIRE_FIELD(last), QUIRE_FIELD(factor),
             QUIRE_FIELD(num_virtual));
QUIRE_STRUCT(LoraRows, QUIRE_FIELD(slots));
QUIRE_STRUCT(LoraLayer, QUIRE_FIELD(rows), QUIRE_FIELD(parts), QUIRE_FIELD(num_parts), QUIRE_FIELD(max_rank));

// With those of the operations' own structs, which every level has alike.
std::vector<Field> all_fields() {
    std::vector<Field> fields = told_fields();
    for (int32_t i = 0; i < kPortableKernels.num_operations; i++) {
        const Operation& operation = kPortableKernels.operations[i];
        fields.insert(fields.end(), operation.fields, operation.fields + operation.num_fields);
    }
    return fields;
}

}  // namespace
}  // namespace quire

// The i-th function that is told of; null beyond the last.
QUIRE_API(const char*, quire_function, int32_t i) {
    const std::vector<std::string>& functions = quire::told_functions();
    return i >= 0 && size_t(i) < functions.size() ? functions[i].c_str() : nullptr;
}

QUIRE_API(const void*, quire_fields, int64_t* count) {
    static const std::vector<quire::Field> fields = quire::all_fields();
    *count = int64_t(fields.size());
    return fields.data();
}
