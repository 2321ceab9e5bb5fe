// Runs the kernels of every level that this CPU has on seeded inputs, and compares them: levels LIBRARY
//
// - A row of a product has the same bits alone, among others, and on one thread and three: on every level.
// - Where a result is rounded but once it has the same bits on every level.
// - A way to multiply large matrices is taken for the fastest only where it clearly is.
// - On 64-bit Arm all else has the portable level's bits, too, but for products of bf16, whose instructions round as they
//   like; those, and sums on levels with wider vectors, are near the portable level's.
//
// tests/unit/ops/test_levels.py builds and starts it, for the machine at hand and for emulated ones.
#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "attention_op.h"
#include "embedding.h"
#include "linear_op.h"
#include "norm.h"
#include "sample_args.h"
#include "scale.h"
#include "softcap.h"
#include "tuning.h"

using namespace quire;
using namespace quire::driver;

namespace {

int num_failures = 0;

void fail(const std::string& what) {
    std::printf("FAILED %s\n", what.c_str());
    num_failures++;
}

enum class Promise {
    exact,    // the same bits on every level
    sums,     // the same on levels of Arm
    products  // the same on levels of Arm without instructions for bf16
};

struct Result {
    std::string name;
    Promise promise;
    std::vector<float> values;
};

std::vector<float> numbers(int64_t count, int seed) {
    std::mt19937 draw(seed);
    std::vector<float> out(count);
    for (float& x : out) x = (float(draw() >> 8) + float(draw() >> 8) + float(draw() >> 8)) * 0x1p-23f - 3.0f;
    return out;
}

// Numbers in a type of activations.
struct Array {
    std::vector<uint8_t> bytes;
    Type type;

    Array(const std::vector<float>& from, Type t) : bytes(from.size() * type_bytes(t)), type(t) {
        for (size_t i = 0; i < from.size(); i++) {
            const bf16 half = to_bf16(from[i]);
            t == Type::f32 ? std::memcpy(&bytes[4 * i], &from[i], 4) : std::memcpy(&bytes[2 * i], &half, 2);
        }
    }
    std::vector<float> floats() const {
        std::vector<float> out(bytes.size() / type_bytes(type));
        for (size_t i = 0; i < out.size(); i++) out[i] = type == Type::f32 ? reinterpret_cast<const float*>(bytes.data())[i] : to_float(reinterpret_cast<const bf16*>(bytes.data())[i]);
        return out;
    }
    Rows rows(int64_t width, int64_t first = 0) { return {bytes.data() + first * width * type_bytes(type), width, type}; }
};

struct Packed {
    std::vector<uint8_t> source, data;
    std::vector<float> scales;
    Matrix matrix{};
};

// Two adapters for a product of `features` outputs: row r has the first, the second or none.
struct Adapters {
    static constexpr int64_t kRank = 5;
    Array a, b;
    std::vector<int32_t> slots;
    LoraPart parts[2];
    LoraRows rows{};
    LoraLayer layer{&rows, parts, 1, kRank};

    Adapters(Type type, int64_t features, int64_t cols, int64_t num_rows)
        : a(numbers(2 * kRank * cols, 51), type), b(numbers(2 * kRank * round_up(features, 16), 52), type), slots(num_rows) {
        const int64_t blocks = divide_up(features, 16);
        for (int64_t i = 0; i < 2; i++) {
            const int64_t at = i * kRank * type_bytes(type);
            parts[i] = {a.bytes.data() + at * cols, b.bytes.data() + at * blocks * 16, kRank - i, 0, blocks, 0.25f, 0};
        }
        for (int64_t r = 0; r < num_rows; r++) slots[r] = int32_t(r * 7 % 3) - 1;
    }
    const LoraLayer* of_rows_from(int64_t first) {
        rows.slots = slots.data() + first;
        return &layer;
    }
};

class Level {
public:
    explicit Level(const Kernels* kernels) : kernels_(kernels) {}
    std::vector<Result> results;

    void run_all() {
        for (int type = int(Type::f32); type < int(Type::q4_0) + kNumBlockTypes; type++)
            for (Type x : {Type::f32, Type::bf16}) {
                product(Type(type), x, Epilogue::none, 24, 256, false);
                if (weight_format(Type(type)).has_pairs) product(Type(type), x, Epilogue::none, 24, 256, false, true);
                if (Type(type) == Type::bf16 || Type(type) == Type::w8a8 || Type(type) == Type::w4a8) product(Type(type), x, Epilogue::silu_mul, 64, 128, true);
            }
        product(Type::w8a8, Type::bf16, Epilogue::none, 40, 1100, false);  // odd numbers of blocks and of their tiles
        product(Type::bf16, Type::bf16, Epilogue::gelu, 33, 299, true);
        product(Type::i4, Type::bf16, Epilogue::gelu_tanh_mul, 64, 160, true);
        for (Type x : {Type::f32, Type::bf16}) {
            rows(x);
            for (Type cache : {x, Type::i8})
                for (float cap : {0.0f, 20.0f}) attention(x, cache, cap);
        }
        sampling();
    }

private:
    void call(const char* name, const void* spec, const Operands& operands, Context& context) {
        for (int32_t i = 0; i < kernels_->num_operations; i++)
            if (!std::strcmp(kernels_->operations[i].name, name)) return kernels_->operations[i].run(spec, operands, context);
        fail(std::string("no operation ") + name);
    }
    void keep(const std::string& name, Promise promise, std::vector<float> values) { results.push_back({name, promise, std::move(values)}); }

    Packed packed(Type type, int64_t num_rows, int64_t cols, bool paired) {
        Packed p;
        p.matrix = {nullptr, nullptr, num_rows, cols, type, paired};
        p.data.resize(p.matrix.num_blocks() * p.matrix.num_tiles() * p.matrix.tile_bytes() + 64);
        p.scales.resize(p.matrix.num_blocks() * 16);
        p.matrix.data = p.data.data() + (64 - reinterpret_cast<uintptr_t>(p.data.data()) % 64);
        if (weight_format(type).has_scales) p.matrix.scales = p.scales.data();
        PackArgs args{p.matrix, nullptr, cols, 0, num_rows, Type::f32};
        if (!is_blocks(type)) {
            p.source = Array(numbers(num_rows * cols, 7), Type::f32).bytes;
        } else {
            const BlockFormat& f = block_format(type);
            args.source_stride = cols / f.values * f.bytes, args.source_type = Type::u8_32;
            p.source.resize(num_rows * args.source_stride);
            std::mt19937 draw(11);
            for (size_t i = 0; i < p.source.size(); i++) {
                const int at = int(i % f.bytes);
                p.source[i] = uint8_t(draw()) & 0xbf;  // no number of 16 or 32 bits of 2 or more
                if (f.is_own() && at < 32 && f.bits == 4) p.source[i] &= 15;
                if (f.is_own() && at == 36) p.source[i] %= 3;
            }
        }
        args.source = p.source.data();
        kernels_->pack(args, one_);
        return p;
    }

    void product(Type type, Type x_type, Epilogue epilogue, int64_t features, int64_t cols, bool whole, bool paired = false) {
        const int64_t most = is_blocks(type) ? 14 : 70;
        const std::string name = "product of type " + std::to_string(int(type)) + (paired ? ", in pairs" : "") + (x_type == Type::f32 ? ", f32" : ", bf16") + ", epilogue " + std::to_string(int(epilogue));
        Packed p = packed(type, features, cols, paired);
        std::vector<float> row(cols), bytes(p.matrix.data, p.matrix.data + p.matrix.num_blocks() * p.matrix.num_tiles() * p.matrix.tile_bytes());
        if (x_type == Type::f32) {
            keep(name + ": packed", Promise::exact, bytes);
            for (int64_t i = 0; i < features; i += 13) kernels_->unpack_row(p.matrix, i, row.data()), keep(name + ": unpacked", Promise::exact, row);
            const int32_t ids[] = {3, int32_t(features), 0, 17};  // one beyond the table
            StepArgs step{};
            step.ids = ids;
            Array embedded(std::vector<float>(4 * cols), Type::bf16);
            const EmbeddingSpec table{p.matrix, 0, 0, nullptr};
            call("embedding", &table, {4, {}, {}, embedded.rows(cols), &step, nullptr, Type::f32}, three_);
            keep(name + ": embedded", Promise::exact, embedded.floats());
        }
        const int64_t width = is_gated(epilogue) ? features / 2 : features;
        Array x(numbers(most * cols, 3), x_type), bias(numbers(features, 4), x_type), residual(numbers(most * width, 5), x_type);
        Adapters adapters(x_type, features, cols, most);
        auto computed = [&](int64_t first, int64_t count, Context& context) {
            Array out(std::vector<float>(count * width), whole ? x_type : Type::f32);
            const LinearSpec spec{p.matrix, whole ? bias.bytes.data() : nullptr, epilogue, 0, 0, whole ? adapters.of_rows_from(first) : nullptr};
            call("linear", &spec, {count, x.rows(cols, first), whole ? residual.rows(width, first) : Rows{}, out.rows(width), nullptr, nullptr, Type::f32}, context);
            return out.floats();
        };
        const std::vector<float> all = computed(0, most, one_);
        for (int64_t count : {1, 2, 3, 4, 5, 7, 8, 12, 13, 65}) {
            if (count > most) break;
            const int64_t first = count % 3 ? most - count : 0;
            const std::vector<float> found = computed(first, count, count % 2 ? three_ : one_);
            if (std::memcmp(found.data(), all.data() + first * width, found.size() * 4))
                fail(std::string(kernels_->name) + ": " + name + ": " + std::to_string(count) + " rows differ from the same among all");
        }
        const bool integers = (type == Type::w8a8 || type == Type::w4a8) && !paired;
        const bool floats = integers || paired || x_type == Type::f32 || type == Type::f32;  // on every level of Arm
        keep(name, integers && !whole ? Promise::exact : floats ? Promise::sums : Promise::products, all);
    }

    void rows(Type type) {
        constexpr int64_t kRows = 19, kCols = 77;
        Array x(numbers(kRows * 2 * kCols, 21), type), weight(numbers(kCols, 22), type), out(std::vector<float>(kRows * kCols), type);
        Operands o{kRows, x.rows(2 * kCols), {}, out.rows(kCols), nullptr, nullptr, Type::f32};
        for (int i = 0; i <= int(Epilogue::silu); i++) {
            const ActivationSpec spec{kCols, Epilogue(i)};
            call("activation", &spec, o, three_);
            keep("activation " + std::to_string(i), Promise::sums, out.floats());
        }
        for (int mean : {0, 1}) {
            const NormSpec spec{weight.bytes.data(), mean ? weight.bytes.data() : nullptr, kCols, 1e-5f, mean, mean};
            call("norm", &spec, o, three_);
            keep("norm", Promise::sums, out.floats());
        }
        const SoftcapSpec cap{kCols, 2.5f};
        call("softcap", &cap, o, one_);
        keep("softcap", Promise::sums, out.floats());
        const ScaleSpec factor{kCols, 1.7f};
        call("scale", &factor, o, one_);
        keep("scale", Promise::exact, out.floats());
    }

    // Two sequences: the last tokens of 1,100, and all twenty of another.
    void attention(Type type, Type cache_type, float cap) {
        constexpr int64_t kHeads = 4, kKv = 2, kDim = 40, kWidth = (kHeads + 2 * kKv) * kDim, kBlock = 32, kBlocks = 40, kTokens = 1120;
        Array qkv(numbers(kTokens * kWidth, 31), type), out(std::vector<float>(kTokens * kHeads * kDim), type), norm(numbers(kDim, 32), type);
        const std::vector<float> angles = numbers(2048 * 16, 33), sinks = numbers(kHeads, 34);
        std::vector<int32_t> tables(2 * kBlocks), positions(kTokens), slots(kTokens);
        for (int i = 0; i < 2 * kBlocks; i++) tables[i] = (i * 37 + 5) % (2 * kBlocks);
        for (int t = 0; t < kTokens; t++) {
            positions[t] = t % 1100;
            slots[t] = int32_t(tables[t / 1100 * kBlocks + positions[t] / kBlock] * kBlock + positions[t] % kBlock);
        }
        const CacheShape shape{kBlock, kKv, kDim, cache_type};
        std::vector<uint8_t> cache(2 * kBlocks * shape.block_bytes() + 64);
        uint8_t* caches[] = {cache.data() + (64 - reinterpret_cast<uintptr_t>(cache.data()) % 64)};
        const HeadSpec heads{kHeads, kKv, kDim, 0, 0};
        const PrepareSpec prepare{heads, norm.bytes.data(), norm.bytes.data(), angles.data(), 16, 0, nullptr, 1e-6f, 0};
        const AttentionSpec attend{heads, cap > 0 ? sinks.data() : nullptr, cap > 0 ? 100 : 0, 0.16f, cap};
        const int32_t lengths[] = {1100, 20}, starts[] = {0, 21, 41};
        auto operate = [&](const char* operation, const void* spec, int64_t begin, Array& to, int64_t width) {
            StepArgs step{};
            step.num_tokens = kTokens - begin, step.num_seqs = 2, step.max_blocks = kBlocks, step.block_size = kBlock;
            step.positions = positions.data() + begin, step.slots = slots.data() + begin;
            step.query_start_loc = starts, step.seq_lens = lengths, step.block_tables = tables.data();
            call(operation, spec, {kTokens - begin, qkv.rows(kWidth, begin), {}, to.rows(width, begin), &step, caches, cache_type}, three_);
        };
        operate("prepare", &prepare, 0, qkv, kWidth);
        operate("attention", &attend, kTokens - 41, out, kHeads * kDim);
        const std::string name = std::string("attention, ") + (type == Type::f32 ? "f32" : "bf16") + ", cache " + std::to_string(int(cache_type));
        keep(name, Promise::sums, out.floats());
        keep(name + ": prepared", Promise::sums, qkv.floats());
    }

    void sampling() {
        constexpr int64_t kVocab = 3001, kRows = 12;
        std::vector<float> logits = numbers(kRows * kVocab, 41);
        std::vector<SampleRow> records(kRows);
        std::vector<int64_t> at(kRows), first(kRows + 1), errors(kRows), tokens(kRows);
        for (int64_t r = 0; r < kRows; r++) {
            SampleRow& row = records[r] = SampleRow{};
            row.mode = r ? SampleMode::draw : SampleMode::greedy, row.seed = 99 + r, row.top_k = r % 3 ? kVocab : 40, row.top_p = r % 2 ? 1.0 : 0.9;
            row.scale = 1.4426950f / 0.8f, row.repetition_penalty = 1, row.num_logprobs = -1;
            at[r] = r, first[r] = r;
        }
        first[kRows] = kRows;
        SampleArgs args{};
        args.logits = logits.data(), args.type = int64_t(Type::f32), args.vocab_size = args.stride = kVocab, args.num_rows = kRows;
        args.rows = records.data(), args.logits_rows = at.data(), args.positions = at.data(), args.first_sample = first.data();
        args.errors = errors.data(), args.token_ids = tokens.data();
        kernels_->sample(args, three_);
        keep("errors of samples", Promise::exact, {errors.begin(), errors.end()});
        keep("samples", Promise::exact, {tokens.begin(), tokens.end()});
    }

    const Kernels* kernels_;
    Context one_{1}, three_{3};
};

// Which way is taken for the fastest.
void tuning() {
    auto expect = [](int32_t found, int32_t expected, const char* what) {
        if (found != expected) fail(std::string("fastest: ") + what);
    };
    expect(fastest({{}, {}}), 0, "nothing was measured");
    expect(fastest({{3, 3}, {1, 1}}), 0, "too little was measured");
    expect(fastest({{4, 4, 9}, {3, 5, 3}, {2, 1, 2}, {4, 4, 1}}), 2, "the least of several");
    expect(fastest({{100, 101, 102}, {98, 99, 100}}), 0, "hardly faster");
    expect(fastest({{3, 3, 3}, {1, 4, 4}}), 0, "faster but once");
    expect(fastest({{1, 4, 4}, {2, 2, 2}}), 0, "the first one has been faster");
}

void compare(const Level& level, const Level& portable, const std::string& name) {
#if defined(__aarch64__)
    const bool arm = true;
#else
    const bool arm = false;
#endif
    for (size_t i = 0; i < level.results.size(); i++) {
        const Result &found = level.results[i], &expected = portable.results[i];
        float most = 0, off = 0;
        bool finite = true;
        for (size_t j = 0; j < found.values.size(); j++) {
            finite = finite && std::isfinite(expected.values[j]) && std::isfinite(found.values[j]);
            most = std::fmax(most, std::fabs(expected.values[j]));
            off = std::fmax(off, std::fabs(expected.values[j] - found.values[j]));
        }
        const bool equal = !std::memcmp(found.values.data(), expected.values.data(), found.values.size() * sizeof(float));
        const bool same = found.promise == Promise::exact || (arm && (found.promise == Promise::sums || name != "neon_bf16"));
        const float bound = found.values.empty() || found.promise == Promise::exact ? 0 : most * 0x1p-6f;
        if (!finite || most == 0) {
            if (found.name.find("errors") == std::string::npos) fail(name + ": " + found.name + " is no number, or nothing but 0");
        } else if (same ? !equal : off > bound) {
            fail(name + ": " + found.name + " is off by " + std::to_string(off) + " of " + std::to_string(most));
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : nullptr;
    if (!library) return std::printf("%s\n", argc == 2 ? dlerror() : "usage: levels LIBRARY"), 2;
    auto name_of = reinterpret_cast<const char* (*)(int32_t)>(dlsym(library, "quire_level"));
    auto kernels_of = reinterpret_cast<const Kernels* (*)(const char*)>(dlsym(library, "quire_kernels"));
    tuning();
    Level portable(kernels_of("portable"));
    portable.run_all();
    for (int32_t i = 0; const char* name = name_of(i); i++) {
        Level level(kernels_of(name));
        if (std::strcmp(name, "portable")) level.run_all();
        else level.results = portable.results;  // whose numbers are looked at
        compare(level, portable, name);
        std::printf("level %s: %zu results\n", name, level.results.size());
    }
    return num_failures ? 1 : 0;
}
