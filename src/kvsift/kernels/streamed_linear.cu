// Few rows times a weight, for decode: an RMS norm before it, a gate or a residual after it, in one launch.
//
// Each block has some tiles; its warps take turns, step by step, and add up their parts in the end.

// A warp's place: the tile, of those of its block, and the step within it.
struct Place {
    int tile, step;

    __device__ __forceinline__ void advance(int by, int steps) {
        for (step += by; step >= steps; step -= steps) ++tile;
    }
};

struct Shared {
    float largest[MAX_ROWS][WARPS], squares[MAX_ROWS][WARPS], factors[MAX_ROWS];
};

__device__ __forceinline__ int column_numbers(const Arguments &a) { return a.num_in + PADDING; }  // in shared memory

// What a thread loads of a row at once: 8 inputs, and the next 8 a hop further, and the weights of their norm.
struct Pieces {
    static constexpr int COUNT = 4, HOP = THREADS * 8;
    uint4 numbers[COUNT], norm[COUNT];

    __device__ __forceinline__ void load(const Arguments &a, int row, int from) {
#pragma unroll
        for (int p = 0; p < COUNT; ++p)
            if (int i = from + p * HOP; i < a.num_in) {
                numbers[p] = *(const uint4 *)(a.x + row * a.x_row + i);
                if (a.norm) norm[p] = *(const uint4 *)(a.norm + i);
            }
    }
    // Calls `use` with the first of 8 inputs, what they are behind the norm but for its factor, and their squares' sum.
    template <class F> __device__ __forceinline__ void each(const Arguments &a, int from, F use) const {
#pragma unroll
        for (int p = 0; p < COUNT; ++p)
            if (from + p * HOP < a.num_in) {
                float x[8], weights[8], squares = 0.f;
                unpack(numbers[p], x);
                if (a.norm) unpack(norm[p], weights);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    squares += x[j] * x[j];
                    if (a.norm) x[j] *= weights[j] + a.norm_offset;
                }
                use(from + p * HOP, x, squares);
            }
    }
};

__device__ __forceinline__ float all_of_warp(float x) {  // their sum
#pragma unroll
    for (int other = 16; other; other >>= 1) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

#if BITS == 8
// Rows times the weight of their norm as float16, each times a power of two; and the factors of their products. Each
// thread calls `meanwhile` behind its first loads.
template <class F>
__device__ __forceinline__ void place_rows(const Arguments &a, Shared &s, u16 *rows, F meanwhile) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, first = thread * 8;
    Pieces pieces;
    for (int row = 0; row < a.rows; ++row) {
        float most = 0.f, sum = 0.f;
        for (int from = first; from < a.num_in || from == first; from += Pieces::COUNT * Pieces::HOP) {
            pieces.load(a, row, from);
            if (row == 0 && from == first) meanwhile();
            pieces.each(a, from, [&](int, const float (&x)[8], float squares) {
                sum += squares;
#pragma unroll
                for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[j]));
            });
        }
        sum = all_of_warp(sum);
#pragma unroll
        for (int other = 16; other; other >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        if (lane == 0) s.largest[row][warp] = most, s.squares[row][warp] = sum;
    }
    __syncthreads();
    bool are_held = a.rows == 1 && a.num_in <= Pieces::COUNT * Pieces::HOP;
    for (int row = 0; row < a.rows; ++row) {
        float most = 0.f, sum = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) most = fmaxf(most, s.largest[row][i]), sum += s.squares[row][i];
        int exponent = max(__float_as_int(most) >> 23, 15);
        float scale = __int_as_float((268 - exponent) << 23);  // times most: in [2^14, 2^15)
        if (thread == 0)
            s.factors[row] = __int_as_float((exponent - 14) << 23) * (a.norm ? rsqrtf(sum / a.num_in + a.eps) : 1.f);
        for (int from = first; from < a.num_in; from += Pieces::COUNT * Pieces::HOP) {
            if (!are_held) pieces.load(a, row, from);
            pieces.each(a, from, [&](int i, float (&x)[8], float) {
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] *= scale;
                *(uint4 *)(rows + row * column_numbers(a) + i) = make_uint4(
                    half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]), half_pair(x[6], x[7])
                );
            });
        }
    }
    __syncthreads();
}
#else
__device__ __forceinline__ InGroup *groups_of(const Arguments &a, u8 *rows) {  // [rows, num_in / GROUP]
    return (InGroup *)(rows + a.rows * COLUMNS * column_numbers(a));
}

// Rows times the weight of their norm as integers below 2^14, each group of inputs times a power of two; and the
// factors of their products. Each thread calls `meanwhile` behind its first loads.
template <class F>
__device__ __forceinline__ void place_rows(const Arguments &a, Shared &s, u8 *rows, F meanwhile) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, first = thread * 8;
    InGroup *groups = groups_of(a, rows);
    Pieces pieces;
    for (int row = 0; row < a.rows; ++row) {
        float sum = 0.f;
        for (int from = first; from < a.num_in || from == first; from += Pieces::COUNT * Pieces::HOP) {
            pieces.load(a, row, from);
            if (row == 0 && from == first) meanwhile();
            pieces.each(a, from, [&](int i, const float (&x)[8], float squares) {  // whole warps
                float most = 0.f;
                sum += squares;
#pragma unroll
                for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[j]));
#pragma unroll
                for (int other = GROUP / 16; other; other >>= 1)
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
                int exponent = max(__float_as_int(most) >> 23, 18), whole = 0;
                float scale = __int_as_float((267 - exponent) << 23);  // times most: in [2^13, 2^14)
                // A word of codes has four inputs of a lane of 16 in its lower halves, and those 8 behind in its upper
                // ones. A thread reads what it multiplies with words of two chunks of 32 inputs at once.
                u8 *to = rows + row * COLUMNS * column_numbers(a) + (i & ~63) + (i & 16) * 2 + (i & 8) + (i & 32) / 8;
#pragma unroll
                for (int word = 0; word < 2; ++word) {
                    u32 v[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) v[j] = __float2int_rn(x[word * 4 + j] * scale), whole += (int)v[j];
                    *(u32 *)(to + column_numbers(a) + word * 16) =
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
            });
        }
        sum = all_of_warp(sum);
        if (lane == 0) s.squares[row][warp] = sum;
    }
    __syncthreads();
    if (thread < a.rows) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += s.squares[thread][i];
        s.factors[thread] = a.norm ? rsqrtf(sum / a.num_in + a.eps) : sum == sum ? 1.f : sum;  // no number stays none
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) streamed_linear(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, within = lane / 4, quarter = lane % 4;
    int tiles = (a.tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    int steps = a.num_in / STEP;
    // Weights of 8 bits: 64 bytes of 8 outputs at a time, and each thread reads what it has copied. Codes of 4 bits: 128
    // bytes of 4 outputs, whose chunks of 16 bytes change places against bank conflicts of ``load_words``. They stay in
    // one line of shared memory, for else the copies of a warp would be one request for each chunk.
    constexpr int LINES = BITS == 4 ? 4 : 2, LANES = 2 * LINES;  // that a thread copies of a tile; threads of a line
    int copied = lane / LANES, chunk = lane % LANES;
    u8 *ring = shared + warp * STAGES * STAGE_BYTES;
    Number *rows = (Number *)(shared + WARPS * STAGES * STAGE_BYTES);
    int row_bytes = COLUMNS * column_numbers(a) * (int)sizeof(Number);
#if BITS == 4
    row_bytes += a.num_in / GROUP * (int)sizeof(InGroup);
#endif
    float *parts = (float *)((u8 *)rows + a.rows * row_bytes);  // [tiles, WARPS, OUTS, rows]
    float *scales = parts + tiles * WARPS * OUTS * a.rows;      // [tiles, OUTS]

    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    u32 ring_address = (u32)__cvta_generic_to_shared(ring);
    int items = max(0, (tiles * steps - warp + WARPS - 1) / WARPS);
    Place asked{0, 0};
    asked.advance(warp, steps);
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
        int tile = asked.tile;
        asked.advance(WARPS, steps);
        if (asked.tile != tile) find_tile();
    };
    auto fill = [&](int from, int to) {
        for (int i = from; i < to; ++i) {
            if (i < items) request(i);
            commit();
        }
    };
    fill(0, EARLY);
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
    int outs = a.gated ? OUTS / 2 : OUTS, results = tiles * outs * a.rows;
    auto residual_of = [&](int result) -> u16 {
        int row = result % a.rows, output = result / a.rows % outs;
        output += (blockIdx.x + result / a.rows / outs * gridDim.x) * outs;
        return a.residual && result < results && output < a.num_out ? a.residual[row * a.residual_row + output] : 0;
    };
    u16 added = residual_of(thread);  // what this thread adds first in the end
    place_rows(a, s, rows, [&] { fill(EARLY, STAGES); });

    float total[SUMS] = {};
    Place at{0, 0};
    at.advance(warp, steps);
    // columns without a row repeat the last one
#if BITS == 8
    const u16 *own = rows + min(within, a.rows - 1) * column_numbers(a) + quarter * 16;
    float sums[2][4] = {};
#else
    int column = min(within / COLUMNS / AT_ONCE, a.rows - 1) * COLUMNS + within % COLUMNS;
    const u8 *own = rows + column * column_numbers(a) + quarter * 16;
    const InGroup *groups = groups_of(a, rows) + min(quarter / AT_ONCE, a.rows - 1) * (a.num_in / GROUP);
#endif
    auto finish = [&](int tile) {
        float *part = parts + (tile * WARPS + warp) * OUTS * a.rows;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
#if BITS == 8
            int row = quarter * 2 + i % 2, half = i / 2;
            total[i] += sums[0][i] + sums[1][i];
            sums[0][i] = sums[1][i] = 0.f;
#else
            int row = quarter % AT_ONCE ? MAX_ROWS : quarter / AT_ONCE, half = i;
#pragma unroll
            for (int other = 1; other < AT_ONCE; other *= 2) total[i] += __shfl_xor_sync(~0u, total[i], other);
#endif
            if (row < a.rows) part[(within + half * (OUTS / 2)) * a.rows + row] = total[i];
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
        at.advance(WARPS, steps);
        if (at.tile != tile || i + 1 == items) finish(tile);
    }
    __syncthreads();

    for (int i = thread; i < results; i += THREADS) {
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
        if (a.gated) y[0] = activated(a, y[0]) * cut(y[1]);
        if (a.residual) y[0] = cut(y[0]) + as_float(i == thread ? added : residual_of(i));
        a.out[(i64)row * a.num_out + output] = rounded(y[0]);
    }
}
