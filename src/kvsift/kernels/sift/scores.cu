// Scores of pages: summaries stream through the ring of a warp and meet the features of the queries on tensor cores.

struct Scorer {
    const Arguments &a;
    char *ring;
    u64 policy;
    int row, head, first, count, warp, step, lane, table_row, ids;

    __device__ __forceinline__ int block_of(int item) { return warp + item / STAGES_PER_BLOCK * step; }

    // Rows of odd pages have the halves of every 128 bytes exchanged, so that two rows are read without a conflict.
    __device__ __forceinline__ void request(int item) {
        int start = block_of(item) * BLOCK_PAGES, part = item % STAGES_PER_BLOCK;
        if (part == 0) ids = start + lane < count ? a.table[table_row + first + start + lane] : 0;
        u32 to = shared_address(ring + item % STAGES * STAGE_BYTES);
        const unsigned char *from = a.summary + head * a.summary_head + lane % ROW_LANES * 16;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int place = i * ROWS_AT_ONCE + lane / ROW_LANES;
            int page = __shfl_sync(~0u, ids, part * PAGES_PER_STAGE + place);
            int chunk = lane % ROW_LANES ^ (place & 1) << 2;
            copy16(to + place * ROW_BYTES + chunk * 16, from + page * a.summary_page, policy);
        }
    }

    __device__ __forceinline__ void consume(int item, const uint4 (&features)[STEPS]) {
        int row_of_lane = lane / 4, quarter = lane % 4;
#pragma unroll
        for (int group = 0; group < PAGES_PER_STAGE / 8; ++group) {
            const char *from = ring + item % STAGES * STAGE_BYTES + (group * 8 + row_of_lane) * ROW_BYTES;
            float sums[4] = {0.f, 0.f, 0.f, 0.f}, more[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int chunk = 0; chunk < ROW_BYTES / 64; ++chunk) {
                uint4 x = *(const uint4 *)(from + (chunk * 4 + quarter ^ (row_of_lane & 1) << 2) * 16);
                if (FP8) {
                    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        u32 one, two;
                        widen(words[w], one, two);
                        multiply(w % 2 ? more : sums, features[(chunk * 4 + w) % STEPS], one, two);
                    }
                } else {
                    multiply(sums, features[chunk * 2 % STEPS], x.x, x.y);
                    multiply(more, features[(chunk * 2 + 1) % STEPS], x.z, x.w);
                }
            }
            // rows t * HEAD_ROWS + g: lanes of the same page add up the terms and compare the heads
            float score[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = sums[i] + more[i] + (sums[i + 2] + more[i + 2]);
                if (HEAD_ROWS == 4) sum += __shfl_xor_sync(~0u, sum, 16);
                score[i] = row_of_lane % HEAD_ROWS < G ? sum : NEGATIVE_INFINITY;
#pragma unroll
                for (int other = 4; other < 4 * HEAD_ROWS; other <<= 1)
                    score[i] = fmaxf(score[i], __shfl_xor_sync(~0u, score[i], other));
            }
            int page = block_of(item) * BLOCK_PAGES + item % STAGES_PER_BLOCK * PAGES_PER_STAGE;
            page += group * 8 + quarter * 2;
            if (page >= count) score[0] = NEGATIVE_INFINITY;
            if (page + 1 >= count) score[1] = NEGATIVE_INFINITY;
            float largest = fmaxf(score[0], score[1]);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            // rows of the workspace have room for whole groups
            if (lane < 4) *(float2 *)(a.scores + (i64)row * a.row_scores + page) = make_float2(score[0], score[1]);
            if (lane == 0) a.maxima[(i64)row * (a.row_scores / GROUP_PAGES) + page / GROUP_PAGES] = largest;
        }
    }
};

// Number e of a row meets number e of a page in one step of the products: which one, and where in the left operand.
__device__ __forceinline__ void place_feature(Shared &s, int g, int e, float feature) {
    constexpr int NUMBERS = FP8 ? 16 : 8;  // in 16 bytes, read by one lane
    int chunk = e / (4 * NUMBERS), quarter = e / NUMBERS % 4, within = e % NUMBERS;
    int step = chunk * (NUMBERS / 4) + within / 4, pair = within % 4 / 2;
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        int row = term * HEAD_ROWS + g;
        u16 *operand = (u16 *)(s.features + step * 32 + row % 8 * 4 + quarter);
        operand[(row / 8 + 2 * pair) * 2 + within % 2] = split(feature);
    }
}
