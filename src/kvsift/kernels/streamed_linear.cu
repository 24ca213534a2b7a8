// Few rows times a weight, for decode: an RMS norm before it, a gate or a residual after it, in one launch.
//
// Weights stream through shared memory, 16 bytes at a time into a ring of each thread's own, so that no barrier stands
// between memory and arithmetic. They are requested before the kernel in front has ended, and the kernel behind may
// start once the last ones are requested: between two products memory stays busy.
//
// A tile is 16 outputs. The blocks of a cluster share some tiles: each has a share of the inputs, so that it needs these
// inputs of the rows alone. The warps of a block divide its steps (128 bytes of each output of a tile, on tensor cores)
// into runs of the same length, whatever the tiles. Parts of a tile are added up in the end, in the order of the inputs.
//
// Weights of 8 bits become float16, whose range is small: the inputs of a row that a block has are multiplied by a power
// of two, so that the largest of them is in [2^14, 2^15). Codes of 4 bits stay integers, which costs one instruction for four of
// them: rows become integers of 15 bits and a power of two for each group of inputs, and are multiplied in two halves,
// which are columns of their own. The sums of a group are exact.
//
// Compiled for: HALF (rows of float16, else bfloat16), BITS of a weight (8 or 4), WARPS, STAGES, SPLIT (blocks of a
// cluster; 1 for codes of 4 bits), AHEAD (steps that are prefetched while the stages are full); for codes of 4 bits
// GROUP (inputs that share a scale: 32, 64 or 128) and SCALE_HALF (scales of float16, else bfloat16).

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
constexpr bool TURNS = BITS == 4;                  // scales of a few steps share a line, and its warps should too
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
    i64 x_row, residual_row, weight_row;  // the last one in bytes
    int rows, num_in, num_out;
    int gated;            // the outputs are gates, and as many values that they are multiplied with follow
    int scale_outs;       // outputs that share a scale
    int scale_row;        // scales from an output's to the next one's
    int scale_steps;      // 1 if each step of inputs has a scale of its own, else 0
    int tiles;
    float eps, norm_offset;  // of the norm; what is added to its weight
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the struct in kernels/streamed_linear.py differs");

__device__ __forceinline__ float as_float(u32 bits16) {
    float x;
    if (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits16));
    else x = __uint_as_float(bits16 << 16);
    return x;
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

__device__ __forceinline__ void unpack(const uint4 &eight, float (&x)[8]) {
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = as_float(words[i] & 0xffff), x[2 * i + 1] = as_float(words[i] >> 16);
}

__device__ __forceinline__ float scale_of(u32 two, int which) {
    float x;
    u32 bits = which ? two >> 16 : two & 0xffff;
    if (SCALE_HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    else x = __uint_as_float(bits << 16);
    return x;
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
__device__ __forceinline__ void wait_for_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ void prefetch_line(const void *at) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], 128;" ::"l"(at));
}
__device__ __forceinline__ void wait_for_cluster() {
    __syncthreads();
    if (SPLIT == 1) return;
    if (threadIdx.x < 32) asm volatile("barrier.cluster.arrive.release;" ::: "memory");  // for the whole block
    else asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void leave_cluster() {  // once nobody reads what this block has
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
__device__ __forceinline__ float of_member(const float *at, int member) {  // what lies there in its shared memory
    if (SPLIT == 1) return *at;
    u32 address = (u32)__cvta_generic_to_shared(at);
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(member));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The steps of a block in each of its tiles, and how its warps divide them.
struct Share {
    int first, last, total;  // steps of a tile; of all tiles
    int warps;               // that have any

    __device__ __forceinline__ Share(int steps, int tiles, int member)
        : first(member * steps / SPLIT), last((member + 1) * steps / SPLIT), total(tiles * (last - first)),
          warps(min(total, WARPS)) {}
    __device__ __forceinline__ int start(int warp) const { return TURNS ? warp : warp * total / warps; }
    __device__ __forceinline__ int steps_of(int warp) const {
        return warp >= warps ? 0 : TURNS ? (total - warp + WARPS - 1) / WARPS : start(warp + 1) - start(warp);
    }
};

// A warp's place: the tile, of those of its cluster, and the step within it.
struct Place {
    int tile, step;

    __device__ __forceinline__ bool advance(const Share &share) {  // whether to the next tile
        int before = tile;
        for (step += TURNS ? WARPS : 1; step >= share.last; step -= share.last - share.first) ++tile;
        return tile != before;
    }
};

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

__device__ __forceinline__ void add_group(
    float (&total)[SUMS], const int (&lower)[4], const int (&upper)[4], InGroup x, const float (&scales)[2],
    const int (&zeros)[2]
) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int low = lower[2 * half] * 256 + lower[2 * half + 1], high = upper[2 * half] * 256 + upper[2 * half + 1];
        total[half] += (float)(low * 16 + high - zeros[half] * x.sum) * (x.unit * scales[half]);
    }
}

// The products of a stage, times the scales of their groups, added to `total`. A thread has the outputs lane / 4 and 8
// behind it, and the row lane % 4. `odd` says of each output whether its zero points begin with the upper two bytes.
__device__ __forceinline__ void multiply_stage(
    const u8 *stage, const u8 *own, const InGroup *groups, bool has_zeros, const bool (&odd)[2], float (&total)[SUMS]
) {
    constexpr u32 LOWER = 0x0f0f0f0f, UPPER = 0xf0f0f0f0;  // codes; 16 times codes
    int lane = threadIdx.x & 31, within = lane / 4;
    u32 line_at = (u32)__cvta_generic_to_shared(stage) + lane % 8 * STEP_BYTES;
    u32 zeros[2][(GROUPS + 3) / 4], scales[2][GROUPS / 2];
    __syncwarp();  // a thread reads what others have copied
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int output = within + half * (OUTS / 2);
#pragma unroll
        for (int j = 0; j < GROUPS / 2; ++j)
            scales[half][j] = *(const u32 *)(stage + SCALES_AT + (output * GROUPS + j * 2) * 2);
#pragma unroll
        for (int j = 0; j < (GROUPS + 3) / 4; ++j) {
            zeros[half][j] = has_zeros ? *(const u32 *)(stage + ZEROS_AT + output * ZERO_BYTES + j * 4) : 0x08080808;
            if (GROUPS == 2 && odd[half]) zeros[half][j] >>= 16;
        }
    }
    int lower[4] = {}, upper[4] = {};
    auto end_group = [&](int group) {
        float scale[2];
        int zero[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            scale[half] = scale_of(scales[half][group / 2], group % 2);
            zero[half] = (zeros[half][group / 4] >> group % 4 * 8 & 255) * 16;
        }
        add_group(total, lower, upper, groups[group], scale, zero);
#pragma unroll
        for (int k = 0; k < 4; ++k) lower[k] = upper[k] = 0;
    };
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        u32 first[4], second[4], words_at = line_at + ((part * 4 + lane / 8) ^ lane % 8) * 16;
        load_words(first, words_at), load_words(second, words_at + OUTS / 2 * STEP_BYTES);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {  // two chunks of 32 inputs
            int chunk = part * 4 + j;
            uint4 x = *(const uint4 *)(own + chunk * 32);
            if (GROUP == 32) {
                multiply(lower, first[j] & LOWER, second[j] & LOWER, x.x);
                multiply(upper, first[j] & UPPER, second[j] & UPPER, x.z);
                end_group(chunk);
                multiply(lower, first[j + 1] & LOWER, second[j + 1] & LOWER, x.y);
                multiply(upper, first[j + 1] & UPPER, second[j + 1] & UPPER, x.w);
                end_group(chunk + 1);
            } else {
                multiply(lower, first[j] & LOWER, second[j] & LOWER, first[j + 1] & LOWER, second[j + 1] & LOWER,
                         x.x, x.y);
                multiply(upper, first[j] & UPPER, second[j] & UPPER, first[j + 1] & UPPER, second[j + 1] & UPPER,
                         x.z, x.w);
                if ((chunk + 2) * 32 % GROUP == 0) end_group(chunk * 32 / GROUP);
            }
        }
    }
    __syncwarp();  // before the stage is asked for again
}
#endif

struct Shared {
    float largest[MAX_ROWS][WARPS], squares[MAX_ROWS][WARPS], factors[MAX_ROWS];
    float square[MAX_ROWS];  // sums
};

// Eight numbers of a row, times their weights of the norm if there is one.
__device__ __forceinline__ void weigh(const Arguments &a, float (&x)[8], const uint4 &weights) {
    if (!a.norm) return;
    float norm[8];
    unpack(weights, norm);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= norm[j] + a.norm_offset;
}

#if BITS == 8
// Inputs of rows times the weight of their norm as float16, times a power of two of the row; and what is undone by it.
// Each row has ROW_WARPS warps. Squares are added up in the same order whatever their number: in WARPS sums, each of
// every WARPS-th piece of 256 inputs.
// `meanwhile` is called while they are under way.
template <int ROW_WARPS, class F>
__device__ __forceinline__ void place_rows_by(
    const Arguments &a, Shared &s, u16 *rows, int first, int count, F meanwhile
) {
    constexpr int PIECES = WARPS / ROW_WARPS, HOP = ROW_WARPS * 256;  // that a warp loads at once; inputs between them
    int lane = threadIdx.x & 31, part = threadIdx.x / 32 % ROW_WARPS, row = threadIdx.x / 32 / ROW_WARPS;
    int own = (part * 32 + lane) * 8;
    const u16 *from = a.x + row * a.x_row + first, *weights = a.norm + first;
    u16 *to = rows + row * (count + PADDING);
    float most = 0.f, sums[PIECES] = {}, x[8];
    if (row >= a.rows || own >= count) meanwhile();
    if (row < a.rows) {
        for (int i = own; i < count; i += PIECES * HOP) {
            uint4 numbers[PIECES], norm[PIECES];
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (i + p * HOP < count) {
                    numbers[p] = *(const uint4 *)(from + i + p * HOP);
                    if (a.norm) norm[p] = *(const uint4 *)(weights + i + p * HOP);
                }
            if (i == own) meanwhile();
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (i + p * HOP < count) {
                    *(uint4 *)(to + i + p * HOP) = numbers[p];
                    unpack(numbers[p], x);
#pragma unroll
                    for (int j = 0; j < 8; ++j) sums[p] += x[j] * x[j];
                    weigh(a, x, norm[p]);
#pragma unroll
                    for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[j]));
                }
        }
#pragma unroll
        for (int other = 16; other; other >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        if (lane == 0) s.largest[row][part] = most;
        if (a.norm)
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
#pragma unroll
                for (int other = 16; other; other >>= 1) sums[p] += __shfl_xor_sync(~0u, sums[p], other);
                if (lane == 0) s.squares[row][part + p * ROW_WARPS] = sums[p];
            }
    }
    __syncthreads();
    if (row < a.rows) {
        most = 0.f;
#pragma unroll
        for (int i = 0; i < ROW_WARPS; ++i) most = fmaxf(most, s.largest[row][i]);
        int exponent = max(__float_as_int(most) >> 23, 15);
        float scale = __int_as_float((268 - exponent) << 23);  // times most: in [2^14, 2^15)
        if (own == 0) {
            float sum = 0.f;
            if (a.norm)
#pragma unroll
                for (int i = 0; i < WARPS; ++i) sum += s.squares[row][i];
            s.factors[row] = __int_as_float((exponent - 14) << 23), s.square[row] = sum;
        }
        for (int i = own; i < count; i += HOP) {
            unpack(*(const uint4 *)(to + i), x);
            if (a.norm) weigh(a, x, *(const uint4 *)(weights + i));
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] *= scale;
            *(uint4 *)(to + i) = make_uint4(
                half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]), half_pair(x[6], x[7])
            );
        }
    }
    __syncthreads();
}

template <class F>
__device__ __forceinline__ void place_rows(
    const Arguments &a, Shared &s, u16 *rows, int first, int count, F meanwhile
) {
    if (a.rows > 4) place_rows_by<WARPS / 8>(a, s, rows, first, count, meanwhile);
    else if (a.rows > 2) place_rows_by<WARPS / 4>(a, s, rows, first, count, meanwhile);
    else if (a.rows == 2) place_rows_by<WARPS / 2>(a, s, rows, first, count, meanwhile);
    else place_rows_by<WARPS>(a, s, rows, first, count, meanwhile);
}
#else
__device__ __forceinline__ InGroup *groups_of(const Arguments &a, u8 *rows) {  // [rows, num_in / GROUP]
    return (InGroup *)(rows + a.rows * COLUMNS * (a.num_in + PADDING));
}

// Rows times the weight of their norm as integers below 2^14, each group of inputs times a power of two; and the
// factors of their products.
template <class F>
__device__ __forceinline__ void place_rows(const Arguments &a, Shared &s, u8 *rows, int, int, F) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    InGroup *groups = groups_of(a, rows);
    int columns = a.num_in + PADDING;
    for (int row = 0; row < a.rows; ++row) {
        float sum = 0.f, x[8];
        for (int i = thread * 8; i < a.num_in; i += THREADS * 8) {  // whole warps
            unpack(*(const uint4 *)(a.x + row * a.x_row + i), x);
            float most = 0.f;
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += x[j] * x[j];
            if (a.norm) weigh(a, x, *(const uint4 *)(a.norm + i));
#pragma unroll
            for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[j]));
#pragma unroll
            for (int other = GROUP / 16; other; other >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
            int exponent = max(__float_as_int(most) >> 23, 18);
            float scale = __int_as_float((267 - exponent) << 23);  // times most: in [2^13, 2^14)
            // A word of codes has four inputs of a lane of 16 in its lower halves, and those 8 behind in its upper
            // ones. A thread reads what it multiplies with words of two chunks of 32 inputs at once.
            u8 *to = rows + row * COLUMNS * columns + (i & ~63) + (i & 16) * 2 + (i & 8) + (i & 32) / 8;
            int whole = 0;
#pragma unroll
            for (int word = 0; word < 2; ++word) {
                u32 v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = __float2int_rn(x[word * 4 + j] * scale), whole += (int)v[j];
                *(u32 *)(to + columns + word * 16) =
                    __byte_perm(__byte_perm(v[0], v[1], 0x40), __byte_perm(v[2], v[3], 0x40), 0x5410);
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] += 128;  // lower halves are signed
                *(u32 *)(to + word * 16) =
                    __byte_perm(__byte_perm(v[0], v[1], 0x51), __byte_perm(v[2], v[3], 0x51), 0x5410);
            }
#pragma unroll
            for (int other = GROUP / 16; other; other >>= 1) whole += __shfl_xor_sync(~0u, whole, other);
            float unit = __int_as_float((exponent - 17) << 23);
            if (exponent == 255) unit = most - most;  // infinity: no number
            if (i % GROUP == 0) groups[row * (a.num_in / GROUP) + i / GROUP] = {unit, whole};
        }
#pragma unroll
        for (int other = 16; other; other >>= 1) sum += __shfl_xor_sync(~0u, sum, other);
        if (lane == 0) s.squares[row][warp] = sum;
    }
    __syncthreads();
    if (thread < a.rows) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += s.squares[thread][i];
        s.factors[thread] = sum == sum ? 1.f : sum;  // no number stays none
        s.square[thread] = sum;
    }
    __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) streamed_linear(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, within = lane / 4, quarter = lane % 4;
    int member = blockIdx.x % SPLIT, cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
    int tiles = (a.tiles - cluster + clusters - 1) / clusters;
    Share share(a.num_in / STEP, tiles, member);
    int inputs = (share.last - share.first) * STEP, run = share.start(warp);
    int items = share.steps_of(warp);
    // Weights of 8 bits: 64 bytes of 8 outputs at a time, and each thread reads what it has copied. Codes of 4 bits: 128
    // bytes of 4 outputs, whose chunks of 16 bytes change places against bank conflicts of ``load_words``. They stay in
    // one line of shared memory, for else the copies of a warp would be one request for each chunk.
    constexpr int LINES = BITS == 4 ? 4 : 2, LANES = 2 * LINES;  // that a thread copies of a tile; threads of a line
    int copied = lane / LANES, chunk = lane % LANES;
    u8 *ring = shared + warp * STAGES * STAGE_BYTES;
    int tile_products = OUTS * a.rows;
    // [tiles, OUTS, rows], which the others of the cluster read at the same place; and of warps, [WARPS, OUTS, rows]: of
    // tiles that the warp before has begun, or [tiles, WARPS, OUTS, rows] in turns
    float *products = (float *)(shared + WARPS * STAGES * STAGE_BYTES), *rests = products + tiles * tile_products;
    float *scales = rests + (TURNS ? tiles : 1) * WARPS * tile_products;  // [tiles, OUTS]
    if (TURNS)
        for (int i = thread; i < tiles * WARPS * tile_products; i += THREADS) rests[i] = 0.f;
    Number *rows = (Number *)(scales + tiles * OUTS);

    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    u32 ring_address = (u32)__cvta_generic_to_shared(ring);
    Place at{run / (share.last - share.first), share.first + run % (share.last - share.first)}, asked = at;
    const u8 *lines[LINES], *few;  // of the tile, at its first step
    auto find_tile = [&] {
#pragma unroll
        for (int k = 0; k < LINES; ++k) {
            int place = k % (LINES / 2) * (32 / LANES) + copied;
            place = k < LINES / 2 ? first_output(a, asked.tile, place) : second_output(a, asked.tile, place);
            lines[k] = a.weight + place * a.weight_row + chunk * 16;
        }
        int place = lane % (OUTS / 2);
        place = lane & OUTS / 2 ? second_output(a, asked.tile, place) : first_output(a, asked.tile, place);
        few = lane < OUTS ? (const u8 *)a.scales + place * (i64)a.scale_row * 2 : a.zeros + place * (i64)a.scale_row;
    };
    find_tile();
    auto request = [&](int slot) {
        int offset = asked.step * STEP_BYTES;
        u32 stage = ring_address + slot * STAGE_BYTES;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            int line = k * 4 + copied;
            if (BITS == 8) copy16(stage + k * 512 + lane * 16, lines[k / 2] + offset + k % 2 * 64, policy);
            else copy16(stage + line * STEP_BYTES + (chunk ^ line % 8) * 16, lines[k % LINES] + offset, policy);
        }
#if BITS == 4
        if (lane < OUTS)
            copy_few<GROUPS * 2>(stage + SCALES_AT + lane * GROUPS * 2, few + asked.step * GROUPS * 2);
        else if (a.zeros)
            copy_few<ZERO_BYTES>(stage + ZEROS_AT + (lane - OUTS) * ZERO_BYTES,
                                 (const u8 *)((u64)(few + asked.step * GROUPS) & ~(u64)(ZERO_BYTES - 1)));
#endif
        if (asked.advance(share)) find_tile();
    };
    bool by_output = BITS == 8 && a.scales && !a.scale_steps;
    if (by_output)  // before all weights, behind which they would queue
        for (int i = thread; i < tiles * OUTS; i += THREADS) {
            int half = i % OUTS / (OUTS / 2), output = i % (OUTS / 2);
            output = half ? second_output(a, i / OUTS, output) : first_output(a, i / OUTS, output);
            copy_few<4>((u32)__cvta_generic_to_shared(scales + i),
                        (const float *)a.scales + output / a.scale_outs * (i64)a.scale_row);
        }
    for (int i = 0; i < STAGES; ++i) {
        if (i < items) request(i);
        commit();
    }
    auto look_ahead = [&] {
        Place next = asked;
        for (int i = STAGES; i < min(STAGES + AHEAD, items); ++i) {
            if (chunk == 0)
#pragma unroll
                for (int k = 0; k < LINES; ++k) prefetch_line(lines[k] + asked.step * STEP_BYTES);
            if (asked.advance(share)) find_tile();
        }
        asked = next;
        if (AHEAD > 0) find_tile();
    };
    if (a.norm)
        for (int i = thread * 64; i < inputs; i += THREADS * 64) prefetch(a.norm + share.first * STEP + i);
    // What is above does not depend on the kernel before, what is below may.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (items <= STAGES) start_next();
    // What this thread adds first in the end is requested now.
    int outs = a.gated ? OUTS / 2 : OUTS, first_result = member * THREADS + thread, results = tiles * outs * a.rows;
    auto residual_of = [&](int result) -> u16 {
        int row = result % a.rows, output = (cluster + result / a.rows / outs * clusters) * outs + result / a.rows % outs;
        return a.residual && result < results && output < a.num_out ? a.residual[row * a.residual_row + output] : 0;
    };
    u16 added = residual_of(first_result);
    place_rows(a, s, rows, share.first * STEP, inputs, look_ahead);

    float total[SUMS] = {};
    // columns without a row repeat the last one
    const Number *own = rows + min(within, a.rows * COLUMNS - 1) * (inputs + PADDING) + quarter * 16;
    own -= share.first * STEP;
#if BITS == 8
    float sums[2][4] = {};
#else
    const InGroup *groups = groups_of(a, rows) + min(quarter, a.rows - 1) * (a.num_in / GROUP);
#endif
    int begun = run - (at.step - share.first);  // the first step of the tile, of those of the block
    auto finish = [&](int tile) {
        float *part = TURNS ? rests + (tile * WARPS + warp) * tile_products
                      : begun < run ? rests + warp * tile_products : products + tile * tile_products;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
#if BITS == 8
            int row = quarter * 2 + i % 2, half = i / 2;
            total[i] += sums[0][i] + sums[1][i];
            sums[0][i] = sums[1][i] = 0.f;
#else
            int row = quarter, half = i;
#endif
            if (row < a.rows) part[(within + half * (OUTS / 2)) * a.rows + row] = total[i] * s.factors[row];
            total[i] = 0.f;
        }
    };
    for (int i = 0, slot = 0; i < items; ++i, slot = slot + 1 == STAGES ? 0 : slot + 1) {
#if BITS == 8
        float scale[2];
        if (a.scale_steps)
            for (int half = 0; half < 2; ++half) {
                int row = half ? second_output(a, at.tile, within) : first_output(a, at.tile, within);
                scale[half] = ((const float *)a.scales)[row / a.scale_outs * (i64)a.scale_row + at.step];
            }
        wait_for_oldest();
        multiply_stage(ring + slot * STAGE_BYTES, own + at.step * STEP, sums);
#else
        bool odd[2] = {};
        if (GROUPS == 2 && a.zeros) {  // two of the four bytes that were copied
            odd[0] = first_output(a, at.tile, within) * (a.scale_row / 2) + at.step & 1;
            odd[1] = second_output(a, at.tile, within) * (a.scale_row / 2) + at.step & 1;
        }
        wait_for_oldest();
        multiply_stage(
            ring + slot * STAGE_BYTES, own + at.step * STEP, groups + at.step * GROUPS, a.zeros, odd, total
        );
#endif
        if (i + STAGES < items) {
            request(slot);
            if (i + STAGES + 1 == items) start_next();
        }
        commit();
#if BITS == 8
        if (a.scale_steps)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[j] += scale[j / 2] * (sums[0][j] + sums[1][j]);
                sums[0][j] = sums[1][j] = 0.f;
            }
#endif
        int tile = at.tile;
        bool ends = at.advance(share);
        if (ends || i + 1 == items) finish(tile);
        if (ends) begun += share.last - share.first;
    }
    wait_for_all();
    __syncthreads();

    int tile_stop = begun + share.last - share.first;
    if (TURNS)
        for (int i = thread; i < tiles * tile_products; i += THREADS) {
            const float *part = rests + i / tile_products * WARPS * tile_products + i % tile_products;
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += part[w * tile_products];
            products[i] = sum;
        }
    else if (begun >= run && begun < run + items && tile_stop > run + items) {  // others have the rest of the last tile
        float *product = products + at.tile * tile_products + lane, sums[OUTS * MAX_ROWS / 32];
        constexpr int MOST = OUTS * MAX_ROWS / 32;
#pragma unroll
        for (int i = 0; i < MOST; ++i) sums[i] = lane + i * 32 < tile_products ? product[i * 32] : 0.f;
        for (int w = warp + 1; share.start(w) < tile_stop; ++w)
#pragma unroll
            for (int i = 0; i < MOST; ++i)
                if (lane + i * 32 < tile_products) sums[i] += rests[w * tile_products + lane + i * 32];
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (lane + i * 32 < tile_products) product[i * 32] = sums[i];
    }
    wait_for_cluster();

    for (int i = first_result; i < results; i += SPLIT * THREADS) {
        int row = i % a.rows, output = i / a.rows % outs, tile = i / a.rows / outs;
        float y[2] = {}, squares = 0.f;
#pragma unroll
        for (int m = 0; m < SPLIT; ++m) {
            const float *product = products + (tile * OUTS + output) * a.rows + row;
            y[0] += of_member(product, m);
            if (a.gated) y[1] += of_member(product + OUTS / 2 * a.rows, m);
            if (a.norm) squares += of_member(s.square + row, m);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (a.norm) y[half] *= rsqrtf(squares / a.num_in + a.eps);
            if (by_output) y[half] *= scales[tile * OUTS + output + half * (OUTS / 2) * a.gated];
        }
        output += (cluster + tile * clusters) * outs;
        if (output >= a.num_out) continue;
        if (a.bias) y[0] += as_float(a.bias[output]);
        if (a.gated) {
            float gate = cut(y[0]);
            y[0] = cut(gate / (1.f + __expf(-gate))) * cut(y[1]);
        }
        if (a.residual) y[0] = cut(y[0]) + as_float(i == first_result ? added : residual_of(i));
        a.out[(i64)row * a.num_out + output] = rounded(y[0]);
    }
    if (SPLIT > 1) leave_cluster();
}
