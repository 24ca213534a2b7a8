// Few rows times a weight, for decode: an RMS norm before it, a gate or a residual after it, in one launch.
//
// Weights stream through shared memory, 16 bytes at a time into a ring of each thread's own, so that no barrier stands
// between memory and arithmetic. They are requested before the kernel in front has ended, and the kernel behind may
// start once the last ones are requested: between two products memory stays busy.
//
// A tile is 16 outputs. Each block has some tiles; its warps take turns, 128 bytes of each output at a time, on tensor
// cores, and add up their parts in the end. Rows are multiplied by a power of two of their own, so that the largest
// number of each is in [2^14, 2^15): weights of few bits become float16, whose range is small.
//
// Compiled for: HALF (rows of float16, else bfloat16), BITS of a weight (8 or 4), WARPS, STAGES; for codes of 4 bits
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
constexpr int MAX_ROWS = 8;                        // columns of the matrix products
constexpr int PADDING = 8;                         // numbers behind a row in shared memory, against bank conflicts

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
    float eps;
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

__device__ __forceinline__ u32 minus(u32 x, u32 y) {  // pairs of float16
    u32 bits;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(x), "r"(y));
    return bits;
}
template <u32 MASK> __device__ __forceinline__ u32 above_1024(u32 codes) {  // (codes & MASK) as pairs of 1024 + code
    u32 bits;
    asm("lop3.b32 %0, %1, %2, 0x64006400, 0xea;" : "=r"(bits) : "r"(codes), "n"(MASK));
    return bits;
}

__device__ __forceinline__ void widen(u32 four, u32 &first, u32 &second) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"((u16)four));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"((u16)(four >> 16)));
}

// 16 outputs times 8 rows, 16 inputs; of which a thread has 4, two of them in each word.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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

// A warp's place: the tile, of those of its block, and the step within it.
struct Place {
    int tile, step;

    __device__ __forceinline__ void advance(int by, int steps) {
        for (step += by; step >= steps; step -= steps) ++tile;
    }
};

// The two outputs of a tile that a thread multiplies: rows of the weight.
__device__ __forceinline__ int first_output(const Arguments &a, int tile, int within) {
    return min((blockIdx.x + tile * gridDim.x) * (a.gated ? OUTS / 2 : OUTS) + within, a.num_out - 1);
}
__device__ __forceinline__ int second_output(const Arguments &a, int tile, int within) {
    return a.gated ? a.num_out + first_output(a, tile, within) : first_output(a, tile, within + OUTS / 2);
}

// The products of a stage: added to `sums`, or times the scales of their groups to `total`. A thread has the outputs
// lane / 4 and 8 behind it, and two rows of its own.
#if BITS == 8
__device__ __forceinline__ void multiply_stage(
    const Arguments &a, const u8 *stage, const u16 *own, Place at, float (&sums)[2][4], float (&total)[4]
) {
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
// Codes of four inputs, in the lower or the upper halves of two words of two outputs: minus their zero points, exactly.
template <u32 MASK> __device__ __forceinline__ void multiply_codes(
    float (&sums)[4], u32 one, u32 two, const u32 (&zeros)[2], u32 x0, u32 x1
) {
    multiply(sums, minus(above_1024<MASK>(one), zeros[0]), minus(above_1024<MASK>(two), zeros[1]),
             minus(above_1024<MASK>(one >> 8), zeros[0]), minus(above_1024<MASK>(two >> 8), zeros[1]), x0, x1);
}

__device__ __forceinline__ void multiply_stage(
    const Arguments &a, const u8 *stage, const u16 *own, Place at, float (&sums)[2][4], float (&total)[4]
) {
    int lane = threadIdx.x & 31, within = lane / 4;
    u32 words_at = (u32)__cvta_generic_to_shared(stage) + lane * 16;
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
            zeros[half][j] = a.zeros ? *(const u32 *)(stage + ZEROS_AT + output * ZERO_BYTES + j * 4) : 0x08080808;
            if (GROUPS == 2 && a.zeros) {  // two of the four bytes that were copied
                int row = half ? second_output(a, at.tile, within) : first_output(a, at.tile, within);
                zeros[half][j] >>= 8 * ((row * a.scale_row + at.step * GROUPS) & 3);
            }
        }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        u32 first[4], second[4];
        load_words(first, words_at + part * 512), load_words(second, words_at + 1024 + part * 512);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int chunk = part * 4 + j, group = chunk * 32 / GROUP;
            uint4 x = *(const uint4 *)(own + chunk * 32);
            u32 lower[2], upper[2];  // zero points as codes are, pairs of 1024 + z and 1024 + 16 z
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                lower[half] = __byte_perm(zeros[half][group / 4], 0x64646464, 0x4040 + group % 4 * 0x0101);
                upper[half] = lower[half] * 16 + (0x64006400u - 16u * 0x64006400u);
            }
            multiply_codes<0x000f000f>(sums[0], first[j], second[j], lower, x.x, x.y);
            multiply_codes<0x00f000f0>(sums[0], first[j], second[j], upper, x.z, x.w);
            if ((chunk + 1) * 32 % GROUP == 0)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    total[k] += scale_of(scales[k / 2][group / 2], group % 2) * sums[0][k];
                    sums[0][k] = 0.f;
                }
        }
    }
    __syncwarp();  // before the stage is asked for again
}
#endif

struct Shared {
    float largest[MAX_ROWS][WARPS], squares[MAX_ROWS][WARPS], factors[MAX_ROWS];
};

__device__ __forceinline__ int row_numbers(const Arguments &a) { return a.num_in + PADDING; }  // in shared memory

// Rows times the weight of their norm as float16, each times a power of two; and the factors of their products.
__device__ __forceinline__ void place_rows(const Arguments &a, Shared &s, u16 *rows) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    for (int row = 0; row < a.rows; ++row) {
        float most = 0.f, sum = 0.f, x[8], norm[8];
        for (int i = thread * 8; i < a.num_in; i += THREADS * 8) {
            unpack(*(const uint4 *)(a.x + row * a.x_row + i), x);
            if (a.norm) unpack(*(const uint4 *)(a.norm + i), norm);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sum += x[j] * x[j];
                most = fmaxf(most, fabsf(a.norm ? x[j] * norm[j] : x[j]));
            }
        }
#pragma unroll
        for (int other = 16; other; other >>= 1) {
            sum += __shfl_xor_sync(~0u, sum, other);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        }
        if (lane == 0) s.largest[row][warp] = most, s.squares[row][warp] = sum;
    }
    __syncthreads();
    for (int row = 0; row < a.rows; ++row) {
        float most = 0.f, sum = 0.f, x[8], norm[8];
#pragma unroll
        for (int i = 0; i < WARPS; ++i) most = fmaxf(most, s.largest[row][i]), sum += s.squares[row][i];
        int exponent = max(__float_as_int(most) >> 23, 15);
        float scale = __int_as_float((268 - exponent) << 23);  // times most: in [2^14, 2^15)
        if (thread == 0)
            s.factors[row] = __int_as_float((exponent - 14) << 23) * (a.norm ? rsqrtf(sum / a.num_in + a.eps) : 1.f);
        for (int i = thread * 8; i < a.num_in; i += THREADS * 8) {
            unpack(*(const uint4 *)(a.x + row * a.x_row + i), x);
            if (a.norm) unpack(*(const uint4 *)(a.norm + i), norm);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = (a.norm ? x[j] * norm[j] : x[j]) * scale;
            u16 *to = rows + row * row_numbers(a) + i;
            if (BITS == 4) {
                // A word of codes has inputs 0 to 3 of a lane of 16 in its lower halves, 8 to 11 in its upper ones, and
                // is read as pairs of bytes 0 and 2, 1 and 3; or inputs 4 to 7 and 12 to 15. Codes in upper halves
                // count 16 times.
                float by = i & 8 ? 1.f / 16 : 1.f;
                to = rows + row * row_numbers(a) + (i & ~15) + (i & 8) / 2;
                *(uint2 *)to = make_uint2(half_pair(x[0] * by, x[2] * by), half_pair(x[1] * by, x[3] * by));
                *(uint2 *)(to + 8) = make_uint2(half_pair(x[4] * by, x[6] * by), half_pair(x[5] * by, x[7] * by));
            } else
                *(uint4 *)to = make_uint4(
                    half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]), half_pair(x[6], x[7])
                );
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) streamed_linear(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, within = lane / 4, quarter = lane % 4;
    int tiles = (a.tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    int steps = a.num_in / STEP;
    // Codes of 4 bits: chunks of 16 bytes (32 inputs) of 8 outputs lie together, for ``load_words``. Else each thread
    // reads what it has copied.
    int place_in_stage = (BITS == 4 ? quarter * 8 + within : lane) * 16;
    u8 *ring = shared + warp * STAGES * STAGE_BYTES;
    u16 *rows = (u16 *)(shared + WARPS * STAGES * STAGE_BYTES);  // [rows, row_numbers]
    float *parts = (float *)(rows + a.rows * row_numbers(a));       // [tiles, WARPS, OUTS, rows]
    float *scales = parts + tiles * WARPS * OUTS * a.rows;       // [tiles, OUTS]

    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    u32 ring_address = (u32)__cvta_generic_to_shared(ring);
    int items = max(0, (tiles * steps - warp + WARPS - 1) / WARPS);
    Place asked{0, 0};
    asked.advance(warp, steps);
    auto request = [&](int slot) {
        const u8 *one = a.weight + first_output(a, asked.tile, within) * a.weight_row;
        const u8 *two = a.weight + second_output(a, asked.tile, within) * a.weight_row;
        int offset = asked.step * STEP_BYTES + quarter * 16;
        u32 stage = ring_address + slot * STAGE_BYTES, to = stage + place_in_stage;
        copy16(to, one + offset, policy), copy16(to + 512, one + offset + 64, policy);
        copy16(to + 1024, two + offset, policy), copy16(to + 1536, two + offset + 64, policy);
#if BITS == 4
        int place = lane % OUTS, half = place / (OUTS / 2), output = place % (OUTS / 2);
        output = half ? second_output(a, asked.tile, output) : first_output(a, asked.tile, output);
        i64 group = output * (i64)a.scale_row + asked.step * GROUPS;
        if (lane < OUTS) copy_few<GROUPS * 2>(stage + SCALES_AT + place * GROUPS * 2, (const u16 *)a.scales + group);
        else if (a.zeros) copy_few<ZERO_BYTES>(stage + ZEROS_AT + place * ZERO_BYTES, a.zeros + (group & -ZERO_BYTES));
#endif
        asked.advance(WARPS, steps);
    };
    for (int i = 0; i < STAGES; ++i) {
        if (i < items) request(i);
        commit();
    }
    if (a.norm)
        for (int i = thread * 64; i < a.num_in; i += THREADS * 64) prefetch(a.norm + i);
    for (int i = thread; i < tiles * WARPS * OUTS * a.rows; i += THREADS) parts[i] = 0.f;
    bool by_output = BITS == 8 && a.scales && !a.scale_steps;
    if (by_output)
        for (int i = thread; i < tiles * OUTS; i += THREADS) {
            int half = i % OUTS / (OUTS / 2), output = i % (OUTS / 2);
            output = half ? second_output(a, i / OUTS, output) : first_output(a, i / OUTS, output);
            scales[i] = ((const float *)a.scales)[output / a.scale_outs * (i64)a.scale_row];
        }

    // What is above does not depend on the kernel before, what is below may.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (items <= STAGES) start_next();
    place_rows(a, s, rows);

    float sums[2][4] = {}, total[4] = {};
    Place at{0, 0};
    at.advance(warp, steps);
    // columns without a row repeat the last one
    const u16 *own = rows + min(within, a.rows - 1) * row_numbers(a) + quarter * (BITS == 4 ? 8 : 16);
    auto finish = [&](int tile) {
        float *part = parts + (tile * WARPS + warp) * OUTS * a.rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = quarter * 2 + i % 2;
            float sum = total[i] + (sums[0][i] + sums[1][i]);
            if (row < a.rows) part[(within + i / 2 * (OUTS / 2)) * a.rows + row] = sum;
            total[i] = sums[0][i] = sums[1][i] = 0.f;
        }
    };
    for (int i = 0, slot = 0; i < items; ++i, slot = slot + 1 == STAGES ? 0 : slot + 1) {
        float scale[2];
        if (BITS == 8 && a.scale_steps)
            for (int half = 0; half < 2; ++half) {
                int row = half ? second_output(a, at.tile, within) : first_output(a, at.tile, within);
                scale[half] = ((const float *)a.scales)[row / a.scale_outs * (i64)a.scale_row + at.step];
            }
        wait_for_oldest();
        multiply_stage(a, ring + slot * STAGE_BYTES, own + at.step * STEP, at, sums, total);
        if (i + STAGES < items) {
            request(slot);
            if (i + STAGES + 1 == items) start_next();
        }
        commit();
        if (BITS == 8 && a.scale_steps)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[j] += scale[j / 2] * (sums[0][j] + sums[1][j]);
                sums[0][j] = sums[1][j] = 0.f;
            }
        int tile = at.tile;
        at.advance(WARPS, steps);
        if (at.tile != tile || i + 1 == items) finish(tile);
    }
    __syncthreads();

    int outs = a.gated ? OUTS / 2 : OUTS;
    for (int i = thread; i < tiles * outs * a.rows; i += THREADS) {
        int row = i % a.rows, output = i / a.rows % outs, tile = i / a.rows / outs;
        float y[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int place = output + half * (OUTS / 2);
            if (half && !a.gated) break;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) y[half] += parts[((tile * WARPS + w) * OUTS + place) * a.rows + row];
            y[half] *= s.factors[row];
            if (by_output) y[half] *= scales[tile * OUTS + place];
        }
        output += (blockIdx.x + tile * gridDim.x) * outs;
        if (output >= a.num_out) continue;
        if (a.bias) y[0] += as_float(a.bias[output]);
        if (a.gated) {
            float gate = cut(y[0]);
            y[0] = cut(gate / (1.f + __expf(-gate))) * cut(y[1]);
        }
        if (a.residual) y[0] = cut(y[0]) + as_float(a.residual[row * a.residual_row + output]);
        a.out[(i64)row * a.num_out + output] = rounded(y[0]);
    }
}
