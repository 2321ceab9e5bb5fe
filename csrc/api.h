// What the C functions of the library (QUIRE_API) share: how Python is told of them, and the contexts that calls run in.
//
// The library is plain C to the outside, loaded by quire/ops/native/library.py with ctypes: no Python or torch headers
// are needed to build it, one build serves every Python, and ctypes lets go of the GIL around each call.
#pragma once

#include <initializer_list>
#include <mutex>
#include <string>
#include <vector>

#include "operation.h"

namespace quire {

// What Python is told of: the fields of structs, and functions, each as its name and the kinds of its result and its arguments.
std::vector<Field>& told_fields();
std::vector<std::string>& told_functions();

template <class Result, class... Arguments>
bool tell(const char* name, Result (*)(Arguments...)) {
    std::string told = name;
    if constexpr (std::is_void_v<Result>)
        told += " none";
    else
        told += std::string(" ") + kind_of<Result>();
    for (const char* kind : std::initializer_list<const char*>{kind_of<Arguments>()...}) told += std::string(" ") + kind;
    told_functions().push_back(told);
    return true;
}

bool tell(std::initializer_list<Field> of_struct);

// Begins the definition of a function that Python may call, of this result, name and parameters.
#define QUIRE_API(Result, name, ...)                                            \
    extern "C" __attribute__((visibility("default"))) Result name(__VA_ARGS__); \
    static const bool kTold_##name = ::quire::tell(#name, &name);               \
    Result name(__VA_ARGS__)

// Tells of a struct that Python makes, with its fields, QUIRE_FIELD each, in order.
#define QUIRE_STRUCT(S, ...)                                                   \
    static const bool kTold_##S = [] {                                         \
        using Spec = S;                                                        \
        constexpr const char* kName = #S;                                      \
        return tell({{kName, "", "", 0, int64_t(sizeof(Spec))}, __VA_ARGS__}); \
    }()

// Something is computed; what waits for a quiet moment goes on waiting (touch.cpp).
void begin_call();
void end_call();
bool is_quiet();  // whether nothing has been computed for a moment

// One call on so many threads, while it lives. Calls on as many threads take turns; others run beside them.
class Call {
public:
    explicit Call(int num_threads);
    ~Call() { end_call(); }

    Context& context;

private:
    std::lock_guard<std::mutex> lock_;
};

}  // namespace quire
