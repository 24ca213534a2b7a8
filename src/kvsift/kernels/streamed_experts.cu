// Up to 8 rows times the weights of their experts, of 8 bits: `expert_products` of kernels/routed_experts.py.
//
// An expert is read once and multiplied with all rows, which are columns of the tensor cores; the products of rows that
// do not get it are dropped. A block has neighbouring tiles of at most two experts, and a warp multiplies a whole tile,
// so that what a row gets depends neither on other rows nor on their number.

constexpr int MOST_PAIRS = 128;  // of a row and an expert
static_assert(MOST_PAIRS <= THREADS, "a thread has one pair");

struct Shared {
    int chosen[MOST_PAIRS], experts[2];      // of pairs; of this block
    u32 firsts[MOST_PAIRS / 32];             // bits of pairs whose expert none before them has
    int pairs[2][MAX_ROWS];                  // of an expert and a row; -1: the row does not get it
    float factors[2][MAX_ROWS];              // of a row, or of its pairs
};

// The tiles of this block, of all experts that any row gets, one after the other.
struct Tiles {
    int per_expert, first, stop, expert;  // expert: the number of the first one, in the order of these

    __device__ __forceinline__ int of(int tile) const { return tile / per_expert - expert; }  // 0 or 1
};

__device__ __forceinline__ Tiles find_tiles(const Arguments &a, Shared &s) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, pairs = a.rows * a.per_row;
    int own = thread < pairs ? a.chosen[thread] : -1;
    if (thread < MOST_PAIRS) s.chosen[thread] = own;
    if (thread < 2 * MAX_ROWS) s.pairs[thread / MAX_ROWS][thread % MAX_ROWS] = -1;
    if (thread < 2) s.experts[thread] = -1;
    __syncthreads();
    bool is_first = own >= 0;
    for (int pair = 0; pair < pairs; ++pair) is_first = is_first && (pair >= thread || s.chosen[pair] != own);
    u32 firsts = __ballot_sync(~0u, is_first);
    if (lane == 0 && warp < MOST_PAIRS / 32) s.firsts[warp] = firsts;
    __syncthreads();
    int before = __popc(firsts & ((1u << lane) - 1)), count = 0;
#pragma unroll
    for (int w = 0; w < MOST_PAIRS / 32; ++w) {
        int found = __popc(s.firsts[w]);
        if (w < warp) before += found;
        count += found;
    }
    int per_expert = a.tiles, all = count * per_expert;
    Tiles tiles{per_expert, (int)blockIdx.x * all / (int)gridDim.x, ((int)blockIdx.x + 1) * all / (int)gridDim.x, 0};
    tiles.expert = tiles.first / per_expert;
    if (is_first && (before == tiles.expert || before == tiles.expert + 1)) s.experts[before - tiles.expert] = own;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 2; ++e)
        if (own >= 0 && own == s.experts[e]) s.pairs[e][thread / a.per_row] = thread;
    __syncthreads();
    return tiles;
}

// Rows as float16, times a power of two of each; and what is undone by it. A warp has a row, or a row's pair with one of
// the experts. Each thread calls `meanwhile` once, behind its first loads.
template <class F>
__device__ __forceinline__ void place_rows(const Arguments &a, Shared &s, u16 *rows, F meanwhile) {
    constexpr int PIECES = 8, HOP = 256;  // that a thread loads at once; inputs between them
    int lane = threadIdx.x & 31, entries = (a.by_pair ? 2 : 1) * a.rows;
    bool waits = true;
    for (int entry = threadIdx.x / 32; entry < entries; entry += WARPS) {
        int expert = entry / a.rows, row = entry % a.rows, from = a.by_pair ? s.pairs[expert][row] : row;
        if (from < 0) continue;
        const u16 *numbers = a.x + from * a.x_row;
        u16 *to = rows + entry * (a.num_in + PADDING);
        float most = 0.f, x[8];
        for (int i = lane * 8; i < a.num_in; i += PIECES * HOP) {
            uint4 loaded[PIECES];
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (i + p * HOP < a.num_in) loaded[p] = *(const uint4 *)(numbers + i + p * HOP);
            if (waits) meanwhile();
            waits = false;
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (i + p * HOP < a.num_in) {
                    *(uint4 *)(to + i + p * HOP) = loaded[p];
                    unpack(loaded[p], x);
#pragma unroll
                    for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[j]));
                }
        }
#pragma unroll
        for (int other = 16; other; other >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        int exponent = max(__float_as_int(most) >> 23, 15);
        float scale = __int_as_float((268 - exponent) << 23);  // times most: in [2^14, 2^15)
        if (lane == 0) s.factors[expert][row] = __int_as_float((exponent - 14) << 23);
        for (int i = lane * 8; i < a.num_in; i += HOP) {
            unpack(*(const uint4 *)(to + i), x);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] *= scale;
            *(uint4 *)(to + i) = make_uint4(
                half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]), half_pair(x[6], x[7])
            );
        }
    }
    if (waits) meanwhile();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) streamed_experts(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, within = lane / 4, quarter = lane % 4;
    int steps = a.num_in / STEP, copied = lane / 4, chunk = lane % 4;
    u8 *ring = shared + warp * STAGES * STAGE_BYTES;
    u16 *rows = (u16 *)(shared + WARPS * STAGES * STAGE_BYTES);
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    u32 ring_address = (u32)__cvta_generic_to_shared(ring);

    // Experts are chosen right before the products of rows, and two launches before those of pairs, which may begin then.
    auto wait = [&] {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        start_next();
    };
    if (!a.by_pair) wait();
    Tiles tiles = find_tiles(a, s);
    int items = max(0, (tiles.stop - tiles.first - warp + WARPS - 1) / WARPS) * steps;
    auto output_of = [&](int tile, int place, int half) {  // a row of the weight
        int output = tile % tiles.per_expert * (a.gated ? OUTS / 2 : OUTS) + place + (a.gated ? 0 : half * (OUTS / 2));
        return min(output, a.num_out - 1) + (a.gated ? half * a.num_out : 0);
    };
    struct {
        int tile, step;
    } asked{tiles.first + warp, 0}, at = asked;
    const u8 *lines[2];  // of the tile, at its first step
    auto find_lines = [&] {
        const u8 *weight = a.weight + s.experts[tiles.of(asked.tile)] * a.of_expert + chunk * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            lines[half] = weight + output_of(asked.tile, copied, half) * a.weight_row;
    };
    if (items) find_lines();
    auto request = [&](int slot) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            copy16(ring_address + slot * STAGE_BYTES + k * 512 + lane * 16,
                   lines[k / 2] + asked.step * STEP_BYTES + k % 2 * 64, policy);
        if (++asked.step < steps) return;
        asked.step = 0, asked.tile += WARPS;
        if (asked.tile < tiles.stop) find_lines();
    };
    auto fill = [&](int from, int to) {
        for (int i = from; i < to; ++i) {
            if (i < items) request(i);
            commit();
        }
    };
    fill(0, EARLY);
    if (a.by_pair) wait();
    place_rows(a, s, rows, [&] { fill(EARLY, STAGES); });

    float total[SUMS] = {}, sums[2][4] = {}, scales[2] = {1.f, 1.f};
    for (int i = 0, slot = 0; i < items; ++i, slot = slot + 1 == STAGES ? 0 : slot + 1) {
        int expert = tiles.of(at.tile), copy = a.by_pair ? expert : 0;
        if (at.step == 0 || a.scale_steps)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                scales[half] = ((const float *)a.scales)[
                    s.experts[expert] * a.scales_of_expert +
                    output_of(at.tile, within, half) / a.scale_outs * (i64)a.scale_row + at.step * a.scale_steps
                ];
        // columns without a row repeat the last one
        const u16 *own = rows + (copy * a.rows + min(within, a.rows - 1)) * (a.num_in + PADDING) + quarter * 16;
        wait_for_oldest();
        multiply_stage(ring + slot * STAGE_BYTES, own + at.step * STEP, sums);
        if (i + STAGES < items) request(slot);
        commit();
        if (a.scale_steps || at.step + 1 == steps)
#pragma unroll
            for (int j = 0; j < SUMS; ++j) {
                total[j] += scales[j / 2] * (sums[0][j] + sums[1][j]);
                sums[0][j] = sums[1][j] = 0.f;
            }
        if (++at.step < steps) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int row = quarter * 2 + j, pair = row < a.rows ? s.pairs[expert][row] : -1;
            if (pair >= 0) {
                float factor = s.factors[copy][row], y[2] = {total[j] * factor, total[j + 2] * factor};
                u16 *out = a.out + (i64)pair * a.num_out;
                int output = at.tile % tiles.per_expert * (a.gated ? OUTS / 2 : OUTS) + within;
                if (a.gated) y[0] = activated(a, y[0]) * cut(y[1]);
                if (output < a.num_out) out[output] = rounded(y[0]);
                if (!a.gated && output + OUTS / 2 < a.num_out) out[output + OUTS / 2] = rounded(y[1]);
            }
            total[j] = total[j + 2] = 0.f;
        }
        at.step = 0, at.tile += WARPS;
    }
}
