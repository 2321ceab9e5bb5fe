// What an operation of a program is: a kernel, what an instruction tells it beside its operands, and its entry in the list
// of operations.
//
// Each operation has a header that declares its struct and its kernel and ends with QUIRE_OPERATION, which is the whole of
// its entry; ops.h includes them all. Programs, the table that a level exports and the structs that Python makes follow from that
// list.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace quire {

// Rows of activations: a buffer of the program's own or of the caller's. No memory: there are none.
struct Rows {
    void* data;
    int64_t stride;  // elements from row to row
    Type type;

    template <class T>
    T* row(int64_t i) const {
        return static_cast<T*>(data) + i * stride;
    }
};

// What a kernel works on. In place, `out` is `x`.
struct Operands {
    int64_t num_rows;
    Rows x, y, out;
    const StepArgs* steps;   // by KV group; null where the program needs none
    uint8_t* const* caches;  // by layer
    Type cache_type;
    Rows more[2];  // what some take beside x and y
};

class Program;

// Runs instructions [first, last) of a program that makes its buffer 1 of its buffer 0 and has none of its own: for operations that are
// made of others.
void run_part(Program& program, int64_t first, int64_t last, int64_t num_rows, const Rows& x, const Rows& out, Context& context);

// The heads of an operation on a layer's cache.
struct HeadSpec {
    int64_t num_heads, num_kv_heads, head_dim;
    int32_t layer;  // which of the run's caches
    int32_t group;  // which of the run's steps says where tokens lie in it

    const StepArgs* step(const Operands& o) const { return o.steps + group; }
    uint8_t* cache(const Operands& o) const { return o.caches[layer]; }
    CacheShape cache_shape(const Operands& o) const { return {step(o)->block_size, num_kv_heads, head_dim, o.cache_type}; }
};

// A field of a struct that Python makes.
struct Field {
    const char *of, *name;  // name "": the struct as a whole
    const char* kind;       // of a number or an address, or the name of a struct; of each element of an array
    int64_t offset, size;
};

// Of what is called Spec, and named kName, where it stands.
#define QUIRE_FIELD(f) {kName, #f, kind_of<decltype(Spec::f)>(), int64_t(offsetof(Spec, f)), int64_t(sizeof(Spec::f))}

template <class Member>
constexpr const char* kind_of() {
    using T = std::remove_all_extents_t<Member>;
    if (std::is_same_v<T, const SampleRow*> || std::is_same_v<T, const char*>) return "bytes";
    if (std::is_pointer_v<T>) return "ptr";
    if (std::is_same_v<T, Matrix>) return "Matrix";
    if (std::is_same_v<T, HeadSpec>) return "HeadSpec";
    if (std::is_floating_point_v<T>) return sizeof(T) == 8 ? "f64" : "f32";
    static_assert(std::is_same_v<T, Matrix> || std::is_same_v<T, HeadSpec> || std::is_scalar_v<T>, "name the struct here");
    return sizeof(T) == 8 ? "i64" : sizeof(T) == 4 ? "i32" : "u8";  // enumerations are integers
}

struct Operation {
    const char* name;
    void (*run)(const void* spec, const Operands&, Context&);
    const Field* fields;  // of what an instruction tells
    int64_t num_fields;
};

constexpr int64_t kSpecBytes = 96;  // room in an instruction for that

}  // namespace quire

#if defined(QUIRE_NS)
namespace quire::QUIRE_NS {

template <int kPlace>
struct Entry;

constexpr int kFirstPlace = __COUNTER__ + 1;

// Enters the operation `name` in the list: its kernel is name(const Spec&, const Operands&, Context&), and the rest are the
// fields of its struct, QUIRE_FIELD each.
#define QUIRE_OPERATION(name, Struct, ...)                                                          \
    template <>                                                                                     \
    struct Entry<__COUNTER__> {                                                                     \
        using Spec = Struct;                                                                        \
        static_assert(sizeof(Spec) <= kSpecBytes, "raise kSpecBytes");      \
        static constexpr const char* kName = #name;                                                 \
        static constexpr Field kFields[] = {{kName, "", "", 0, int64_t(sizeof(Spec))}, __VA_ARGS__}; \
        static void run(const void* spec, const Operands& operands, Context& context) {             \
            name(*static_cast<const Spec*>(spec), operands, context);                               \
        }                                                                                           \
    }

template <int... kPlaces>
constexpr std::array<Operation, sizeof...(kPlaces)> operations_at(std::integer_sequence<int, kPlaces...>) {
    return {{{Entry<kFirstPlace + kPlaces>::kName, Entry<kFirstPlace + kPlaces>::run, Entry<kFirstPlace + kPlaces>::kFields,
              int64_t(std::size(Entry<kFirstPlace + kPlaces>::kFields))}...}};
}

}  // namespace quire::QUIRE_NS
#endif
