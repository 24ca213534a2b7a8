// Up to 8 rows times a weight of 8 bits, as ``streamed_linear`` does it for fewer.
//
// The blocks of a cluster share some tiles: each has a share of the inputs, so that it needs these inputs of the rows
// alone. The warps of a block divide its steps into runs of the same length, whatever the tiles, so that there is hardly
// a sum of more than one warp. The sums of blocks are added up in the end, in the order of the inputs, whatever the
// number of rows.

__device__ __forceinline__ void wait_for_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
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

// The steps of a block in each of its tiles, and how its warps divide them.
struct Share {
    int first, last, total;  // steps of a tile; of all tiles
    int warps;               // that have any

    __device__ __forceinline__ Share(int steps, int tiles, int member)
        : first(member * steps / SPLIT), last((member + 1) * steps / SPLIT), total(tiles * (last - first)),
          warps(min(total, WARPS)) {}
    __device__ __forceinline__ int start(int warp) const { return warp * total / warps; }
    __device__ __forceinline__ int steps_of(int warp) const {
        return warp < warps ? start(warp + 1) - start(warp) : 0;
    }
};

// A warp's place: the tile, of those of its cluster, and the step within it.
struct Place {
    int tile, step;

    __device__ __forceinline__ bool advance(const Share &share) {  // whether to the next tile
        if (++step < share.last) return false;
        step = share.first, ++tile;
        return true;
    }
};

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

// Inputs of rows times the weight of their norm as float16, times a power of two of the row; and what is undone by it.
// Each row has ROW_WARPS warps. Squares are added up in the same order whatever their number: in WARPS sums, each of
// every WARPS-th piece of 256 inputs. Each thread calls `meanwhile` once, behind its first loads.
template <int ROW_WARPS, class F>
__device__ __forceinline__ void place_rows(
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) streamed_rows(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, within = lane / 4, quarter = lane % 4;
    int member = blockIdx.x % SPLIT, cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
    int tiles = (a.tiles - cluster + clusters - 1) / clusters;
    Share share(a.num_in / STEP, tiles, member);
    int inputs = (share.last - share.first) * STEP, run = share.start(warp);
    int items = share.steps_of(warp);
    // 64 bytes of 8 outputs at a time; each thread reads what it has copied.
    constexpr int LINES = 2, LANES = 4;  // that a thread copies of a tile; threads of a line
    int copied = lane / LANES, chunk = lane % LANES;
    u8 *ring = shared + warp * STAGES * STAGE_BYTES;
    int tile_products = OUTS * a.rows;
    // [tiles, OUTS, rows], which the others of the cluster read at the same place; and of tiles that the warp before has
    // begun, [WARPS, OUTS, rows]
    float *products = (float *)(shared + WARPS * STAGES * STAGE_BYTES), *rests = products + tiles * tile_products;
    float *scales = rests + WARPS * tile_products;  // [tiles, OUTS]
    u16 *rows = (u16 *)(scales + tiles * OUTS);

    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    u32 ring_address = (u32)__cvta_generic_to_shared(ring);
    Place at{run / (share.last - share.first), share.first + run % (share.last - share.first)}, asked = at;
    const u8 *lines[LINES];  // of the tile, at its first step
    auto find_tile = [&] {
        lines[0] = a.weight + first_output(a, asked.tile, copied) * a.weight_row + chunk * 16;
        lines[1] = a.weight + second_output(a, asked.tile, copied) * a.weight_row + chunk * 16;
    };
    find_tile();
    auto request = [&](int slot) {
        int offset = asked.step * STEP_BYTES;
        u32 stage = ring_address + slot * STAGE_BYTES;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            copy16(stage + k * 512 + lane * 16, lines[k / 2] + offset + k % 2 * 64, policy);
        if (asked.advance(share)) find_tile();
    };
    bool by_output = a.scales && !a.scale_steps;
    if (by_output)  // before all weights, behind which they would queue
        for (int i = thread; i < tiles * OUTS; i += THREADS) {
            int half = i % OUTS / (OUTS / 2), output = i % (OUTS / 2);
            output = half ? second_output(a, i / OUTS, output) : first_output(a, i / OUTS, output);
            copy_few<4>((u32)__cvta_generic_to_shared(scales + i),
                        (const float *)a.scales + output / a.scale_outs * (i64)a.scale_row);
        }
    auto fill = [&](int from, int to) {
        for (int i = from; i < to; ++i) {
            if (i < items) request(i);
            commit();
        }
    };
    fill(0, EARLY);
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
    auto fill_rest = [&] { fill(EARLY, STAGES); };
    if (a.rows > MAX_ROWS / 2) place_rows<WARPS / MAX_ROWS>(a, s, rows, share.first * STEP, inputs, fill_rest);
    else place_rows<2 * WARPS / MAX_ROWS>(a, s, rows, share.first * STEP, inputs, fill_rest);

    float total[SUMS] = {};
    // columns without a row repeat the last one
    const u16 *own = rows + min(within, a.rows - 1) * (inputs + PADDING) + quarter * 16 - share.first * STEP;
    float sums[2][4] = {};
    int begun = run - (at.step - share.first);  // the first step of the tile, of those of the block
    auto finish = [&](int tile) {
        float *part = begun < run ? rests + warp * tile_products : products + tile * tile_products;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            int row = quarter * 2 + i % 2, half = i / 2;
            total[i] += sums[0][i] + sums[1][i];
            sums[0][i] = sums[1][i] = 0.f;
            if (row < a.rows) part[(within + half * (OUTS / 2)) * a.rows + row] = total[i] * s.factors[row];
            total[i] = 0.f;
        }
    };
    for (int i = 0, slot = 0; i < items; ++i, slot = slot + 1 == STAGES ? 0 : slot + 1) {
        float scale[2];
        if (a.scale_steps)
            for (int half = 0; half < 2; ++half) {
                int row = half ? second_output(a, at.tile, within) : first_output(a, at.tile, within);
                scale[half] = ((const float *)a.scales)[row / a.scale_outs * (i64)a.scale_row + at.step];
            }
        wait_for_oldest();
        multiply_stage(ring + slot * STAGE_BYTES, own + at.step * STEP, sums);
        if (i + STAGES < items) {
            request(slot);
            if (i + STAGES + 1 == items) start_next();
        }
        commit();
        if (a.scale_steps)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[j] += scale[j / 2] * (sums[0][j] + sums[1][j]);
                sums[0][j] = sums[1][j] = 0.f;
            }
        int tile = at.tile;
        bool ends = at.advance(share);
        if (ends || i + 1 == items) finish(tile);
        if (ends) begun += share.last - share.first;
    }
    wait_for_all();
    __syncthreads();

    int tile_stop = begun + share.last - share.first;
    if (begun >= run && begun < run + items && tile_stop > run + items) {  // others have the rest of the last tile
        constexpr int MOST = OUTS * MAX_ROWS / 32;
        float *product = products + at.tile * tile_products + lane, sums[MOST];
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
            if (by_output) y[half] *= scales[tile * OUTS + output + (a.gated ? half * (OUTS / 2) : 0)];
        }
        output += (cluster + tile * clusters) * outs;
        if (output >= a.num_out) continue;
        if (a.bias) y[0] += as_float(a.bias[output]);
        if (a.gated) y[0] = activated(a, y[0]) * cut(y[1]);
        if (a.residual) y[0] = cut(y[0]) + as_float(i == first_result ? added : residual_of(i));
        a.out[(i64)row * a.num_out + output] = rounded(y[0]);
    }
    if (SPLIT > 1) leave_cluster();
}
