// Scores of pages: summaries stream through the ring of a warp and meet the features of the queries on tensor cores.

struct Scorer {
    const Arguments &a;
    char *ring;
    u64 policy;
    int row, head, first, count, warp, step, lane, table_row, ids;
    float sums[4], more[4];

    __device__ __forceinline__ int block_of(int item) { return warp + item / STAGES_PER_BLOCK * step; }

    // Slices of odd pages have the halves of every 128 bytes exchanged, so that two are read without a conflict.
    __device__ __forceinline__ void request(int item) {
        int start = block_of(item) * BLOCK_PAGES, part = item % STAGES_PER_BLOCK;
        if (part == 0) ids = start + lane < count ? a.table[table_row + first + start + lane] : 0;
        u32 to = shared_address(ring + item % STAGES * STAGE_BYTES);
        const unsigned char *from = a.summary + head * a.summary_head + lane % SLICE_LANES * 16;
        if (SLICES > 1) from += part % SLICES * SLICE_BYTES;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int place = i * SLICES_AT_ONCE + lane / SLICE_LANES;
            int page = __shfl_sync(~0u, ids, part / SLICES * PAGES_PER_STAGE + place);
            int chunk = lane % SLICE_LANES ^ (place & 1) << 2;
            copy16(to + place * SLICE_BYTES + chunk * 16, from + page * a.summary_page, policy);
        }
    }

    // feature(pass, n) is this lane's part of the left operand of product n of a row.
    template <typename Feature> __device__ __forceinline__ void consume(int item, Feature feature) {
        int row_of_lane = lane / 4, quarter = lane % 4, part = item % STAGES_PER_BLOCK, slice = part % SLICES;
        int before = slice * (SLICE_BYTES / 64);  // chunks of the row
#pragma unroll
        for (int group = 0; group < PAGES_PER_STAGE / 8; ++group) {
            const char *from = ring + item % STAGES * STAGE_BYTES + (group * 8 + row_of_lane) * SLICE_BYTES;
            if (slice == 0)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = more[i] = 0.f;
#pragma unroll
            for (int chunk = 0; chunk < SLICE_BYTES / 64; ++chunk) {
                uint4 x = *(const uint4 *)(from + (chunk * 4 + quarter ^ (row_of_lane & 1) << 2) * 16);
                const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int pass = 0; pass < PASSES; ++pass) {
                    if (FP8) {
#pragma unroll
                        for (int w = 0; w < 4; ++w) {
                            u32 one, two;
                            widen(words[w], one, two);
                            uint4 f = feature(pass, (before + chunk) * 4 + w);
                            multiply16<HALVES>(w % 2 ? more : sums, f.x, f.y, f.z, f.w, one, two);
                        }
                    } else {
                        uint4 f = feature(pass, (before + chunk) * 2), next = feature(pass, (before + chunk) * 2 + 1);
                        multiply16<HALVES>(sums, f.x, f.y, f.z, f.w, words[0], words[1]);
                        multiply16<HALVES>(more, next.x, next.y, next.z, next.w, words[2], words[3]);
                    }
                }
            }
            if (slice == SLICES - 1) leave_scores(block_of(item) * BLOCK_PAGES + part / SLICES * PAGES_PER_STAGE + group * 8);
        }
    }

    // Scores of eight pages: lanes of the same pages compare the heads. Rows of the products are of the heads, term by
    // term; lane / 4 has one, and the eighth behind it.
    __device__ __forceinline__ void leave_scores(int page) {
        int row_of_lane = lane / 4, quarter = lane % 4;
        float score[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = sums[i] + more[i], later = sums[i + 2] + more[i + 2];
            if (HEAD_ROWS < 16) sum += later;
            if (HEAD_ROWS == 4) sum += __shfl_xor_sync(~0u, sum, 16);
            score[i] = row_of_lane % HEAD_ROWS < G ? sum : NEGATIVE_INFINITY;
            if (HEAD_ROWS == 16 && row_of_lane + 8 < G) score[i] = fmaxf(score[i], later);
#pragma unroll
            for (int other = 4; other < 32 && other < 4 * HEAD_ROWS; other <<= 1)
                score[i] = fmaxf(score[i], __shfl_xor_sync(~0u, score[i], other));
        }
        page += quarter * 2;
        if (page >= count) score[0] = NEGATIVE_INFINITY;
        if (page + 1 >= count) score[1] = NEGATIVE_INFINITY;
        float largest = fmaxf(score[0], score[1]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        // rows of the workspace have room for whole groups
        if (lane < 4) *(float2 *)(a.scores + (i64)row * a.row_scores + page) = make_float2(score[0], score[1]);
        if (lane == 0) a.maxima[(i64)row * (a.row_scores / GROUP_PAGES) + page / GROUP_PAGES] = largest;
    }
};

// Number e of a row meets number e of a page in one step of the products: which one, and where in the left operand.
__device__ __forceinline__ void place_feature(Shared &s, int g, int e, float feature) {
    constexpr int NUMBERS = FP8 ? 16 : 8;  // in 16 bytes, read by one lane
    int chunk = e / (4 * NUMBERS), quarter = e / NUMBERS % 4, within = e % NUMBERS;
    int step = chunk * (NUMBERS / 4) + within / 4, pair = within % 4 / 2;
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        int row = PASSES == 1 ? term * HEAD_ROWS + g : g, pass = PASSES == 1 ? 0 : term;
        u16 *operand = (u16 *)(s.features + (pass * STEPS + step) * 32 + row % 8 * 4 + quarter);
        operand[(row / 8 + 2 * pair) * 2 + within % 2] = split(feature);
    }
}
