// What kernels of few rows times a weight share: numbers, copies, and the products of a tile's step.
//
// Weights stream through shared memory, 16 bytes at a time into a ring of each thread's own, so that no barrier stands
// between memory and arithmetic. They are requested before the kernel in front has ended, and the kernel behind may
// start once the last ones are requested: between two products memory stays busy.
//
// A tile is 16 outputs, and a step of it 128 bytes of each, which a warp multiplies on tensor cores.
//
// Weights of 8 bits become float16, whose range is small: rows are multiplied by a power of two of their own, so that
// the largest number of each is in [2^14, 2^15). Codes of 4 bits stay integers, which costs one instruction for four of
// them: rows become integers of 15 bits and a power of two for each group of inputs that shares a scale, and are
// multiplied in two halves, which are columns of their own. The sums of a group are exact. Where columns are left, other
// groups have them, zero in all inputs but their own: a thread scales the sums of one group, and few of a step.
//
// Compiled for: HALF (rows of float16, else bfloat16), BITS of a weight (8 or 4), WARPS, STAGES, SPLIT (blocks that
// share the inputs of a tile), EARLY (stages that are filled before the kernel in front has ended, ahead of the rows; the
// others behind them); for codes of 4 bits GROUP (inputs that share a scale: 32, 64 or 128), SCALE_HALF (scales
// of float16, else bfloat16) and AT_ONCE (groups that have columns of their own).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = WARPS * 32;
constexpr int OUTS = 16, STEP_BYTES = 128;         // of a tile; of an output
constexpr int STEP = STEP_BYTES * 8 / BITS;        // inputs
constexpr int GROUPS = BITS == 4 ? STEP / GROUP : 0;  // of a step
constexpr int SCALES_AT = OUTS * STEP_BYTES, ZEROS_AT = SCALES_AT + OUTS * GROUPS * 2;
constexpr int ZERO_BYTES = GROUPS < 4 ? 4 : GROUPS;  // that are copied
constexpr int STAGE_BYTES = BITS == 4 ? (ZEROS_AT + OUTS * ZERO_BYTES + 15) / 16 * 16 : SCALES_AT;  // of a warp
constexpr int MAX_ROWS = 8;                        // columns of the matrix products
#if BITS == 8
typedef u16 Number;                                // of rows in shared memory: float16
constexpr int COLUMNS = 1, PADDING = 8;            // of a row; numbers behind it, against bank conflicts
constexpr int SUMS = 4;                            // of a thread: of two outputs and two rows
#else
typedef u8 Number;                                 // half an integer
constexpr int COLUMNS = 2, PADDING = 64;           // upper halves, then lower ones
constexpr int SUMS = 2;                            // of two outputs and a row
#endif

struct Arguments {
    const u16 *x;
    const u8 *weight;
    const void *scales;   // float32 of outputs or blocks, or null; 16 bits of groups
    const u8 *zeros;      // of groups, or null: all are 8
    const u16 *norm, *bias, *residual;  // or null
    u16 *out;
    const int *chosen;    // experts of each row, per_row of them (streamed_experts.cu alone, as what follows of experts)
    i64 x_row, residual_row, weight_row;  // the last one in bytes
    i64 of_expert, scales_of_expert;      // from an expert's to the next one's, bytes and scales
    int rows, num_in, num_out;
    int gated;            // the outputs are gates, of SiLU (1) or GELU by tanh (2), and as many values follow, which
                          // are multiplied with them
    int scale_outs;       // outputs that share a scale
    int scale_row;        // scales from an output's to the next one's
    int scale_steps;      // 1 if each step of inputs has a scale of its own, else 0
    int tiles;            // of all outputs, or of those of an expert
    int per_row, by_pair; // by_pair: x has a row for each pair of a row and its expert
    float eps, norm_offset;  // of the norm; what is added to its weight
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the struct in kernels/streamed_linear.py differs");

__device__ __forceinline__ float from_half(u32 bits16) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits16));
    return x;
}
__device__ __forceinline__ float as_float(u32 bits16) {
    return HALF ? from_half(bits16) : __uint_as_float(bits16 << 16);
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ u16 rounded(float x) {
    u16 bits;
    if (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ float cut(float x) { return as_float(rounded(x)); }
__device__ __forceinline__ float activated(const Arguments &a, float gate) {  // both rounded
    gate = cut(gate);
    float slope = a.gated == 2 ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
    return cut(gate / (1.f + __expf(-slope)));
}

__device__ __forceinline__ void unpack(const uint4 &eight, float (&x)[8]) {
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = as_float(words[i] & 0xffff), x[2 * i + 1] = as_float(words[i] >> 16);
}

__device__ __forceinline__ float scale_of(u32 two, int which) {
    u32 bits = which ? two >> 16 : two & 0xffff;
    return SCALE_HALF ? from_half(bits) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ void widen(u32 four, u32 &first, u32 &second) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"((u16)four));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"((u16)(four >> 16)));
}

// 16 outputs times 8 columns, 16 inputs; of which a thread has 4, two of them in each word.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 outputs times 8 columns, 32 inputs or 16; of which a thread has 4 in each word.
__device__ __forceinline__ void multiply(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(int (&sums)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

__device__ __forceinline__ void copy16(u32 to, const void *from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "l"(policy) : "memory");
}
template <int BYTES> __device__ __forceinline__ void copy_few(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void load_words(u32 (&words)[4], u32 from) {  // word lane % 4 of four chunks of row lane / 4
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_oldest() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
}
__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The two outputs of a tile that a thread multiplies: rows of the weight.
__device__ __forceinline__ int first_output(const Arguments &a, int tile, int within) {
    return min(((int)blockIdx.x / SPLIT + tile * ((int)gridDim.x / SPLIT)) * (a.gated ? OUTS / 2 : OUTS) + within, a.num_out - 1);
}
__device__ __forceinline__ int second_output(const Arguments &a, int tile, int within) {
    return a.gated ? a.num_out + first_output(a, tile, within) : first_output(a, tile, within + OUTS / 2);
}

#if BITS == 8
// The products of a stage, added to `sums`. A thread has the outputs lane / 4 and 8 behind it, and two rows of its own.
__device__ __forceinline__ void multiply_stage(const u8 *stage, const u16 *own, float (&sums)[2][4]) {
    const u8 *from = stage + (threadIdx.x & 31) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 one = *(const uint4 *)(from + half * 512), two = *(const uint4 *)(from + 1024 + half * 512);
        const u32 first[4] = {one.x, one.y, one.z, one.w}, second[4] = {two.x, two.y, two.z, two.w};
        const uint4 *x = (const uint4 *)(own + half * (STEP / 2));
        uint4 low = x[0], high = x[1];
        const u32 numbers[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            u32 a0, a1, a2, a3;
            widen(first[w], a0, a2), widen(second[w], a1, a3);
            multiply(sums[w % 2], a0, a1, a2, a3, numbers[2 * w], numbers[2 * w + 1]);
        }
    }
}
#else
// What the integers of a row count in a group of inputs, over 16; and their sum.
struct InGroup {
    float unit;
    int sum;
};

// The products of a stage, times the scales of their groups, added to `total`. A thread has the outputs lane / 4 and 8
// behind it, and of AT_ONCE groups one of one row, whose numbers `groups` has for all groups; `own` are the integers of
// its column. `odd` says of each output whether its zero points begin with the upper two bytes.
__device__ __forceinline__ void multiply_stage(
    const u8 *stage, const u8 *own, const InGroup *groups, bool has_zeros, const bool (&odd)[2], float (&total)[SUMS]
) {
    constexpr u32 LOWER = 0x0f0f0f0f, UPPER = 0xf0f0f0f0;  // codes; 16 times codes
    int lane = threadIdx.x & 31, within = lane / 4;
    int column_group = within / COLUMNS % AT_ONCE, own_group = lane % 4 % AT_ONCE;
    u32 line_at = (u32)__cvta_generic_to_shared(stage) + lane % 8 * STEP_BYTES;
    __syncwarp();  // a thread reads what others have copied
    int lower[4] = {}, upper[4] = {};
    auto end_groups = [&](int first) {  // of AT_ONCE
        int group = first + own_group;
        InGroup x = groups[group];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int output = within + half * (OUTS / 2), zero = 8;
            float scale = scale_of(*(const u16 *)(stage + SCALES_AT + (output * GROUPS + group) * 2), 0);
            if (has_zeros) zero = stage[ZEROS_AT + output * ZERO_BYTES + group + (GROUPS == 2 && odd[half]) * 2];
            int low = lower[2 * half] * 256 + lower[2 * half + 1], high = upper[2 * half] * 256 + upper[2 * half + 1];
            total[half] += (float)(low * 16 + high - zero * 16 * x.sum) * (x.unit * scale);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) lower[k] = upper[k] = 0;
    };
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        u32 first[4], second[4], words_at = line_at + ((part * 4 + lane / 8) ^ lane % 8) * 16;
        load_words(first, words_at), load_words(second, words_at + OUTS / 2 * STEP_BYTES);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {  // two chunks of 32 inputs
            int chunk = part * 4 + j, group = chunk * 32 / GROUP, next = (chunk + 1) * 32 / GROUP;
            uint4 x = *(const uint4 *)(own + chunk * 32);
            if (next > group && AT_ONCE == 1) {
                multiply(lower, first[j] & LOWER, second[j] & LOWER, x.x);
                multiply(upper, first[j] & UPPER, second[j] & UPPER, x.z);
                end_groups(group);
                multiply(lower, first[j + 1] & LOWER, second[j + 1] & LOWER, x.y);
                multiply(upper, first[j + 1] & UPPER, second[j + 1] & UPPER, x.w);
            } else {
                if (group % AT_ONCE != column_group) x.x = x.z = 0;
                if (next % AT_ONCE != column_group) x.y = x.w = 0;
                multiply(lower, first[j] & LOWER, second[j] & LOWER, first[j + 1] & LOWER, second[j + 1] & LOWER,
                         x.x, x.y);
                multiply(upper, first[j] & UPPER, second[j] & UPPER, first[j + 1] & UPPER, second[j + 1] & UPPER,
                         x.z, x.w);
            }
            if ((chunk + 2) * 32 % (GROUP * AT_ONCE) == 0) end_groups((chunk + 2) * 32 / GROUP - AT_ONCE);
        }
    }
    __syncwarp();  // before the stage is asked for again
}
#endif
