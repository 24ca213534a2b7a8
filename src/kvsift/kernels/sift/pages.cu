// Attention over listed pages.

struct Attender {
    static constexpr int STEP = 32 * sizeof(Packed);  // bytes that a warp copies at a time
    static constexpr int STAGE_PARTS = 2 * PARTS < 8 ? 2 * PARTS : 8, PIECES = 2 * PARTS / STAGE_PARTS;
    static constexpr int ROWS = STAGE_PARTS * STEP;  // bytes of a stage, behind which scales lie
    static_assert(ROWS + (CODED ? 8 * UNIT : 0) <= STAGE_BYTES, "a stage has no room for scales");
    const Arguments &a;
    const Shared &s;
    char *ring;
    int head, length, warp, step, lane;

    __device__ __forceinline__ int position(int item) {
        int unit = warp + item * step;
        return s.pages[unit / (PAGE / UNIT)] * PAGE + unit % (PAGE / UNIT) * UNIT;
    }

    // One of the pieces of an item, eight tokens: their keys and values, or a part of either.
    __device__ __forceinline__ void request(int stage) {
        int unit = warp + stage / PIECES * step, piece = stage % PIECES;
        i64 page = s.physical[unit / (PAGE / UNIT)];
        int token = unit % (PAGE / UNIT) * UNIT;
        const char *keys = (const char *)a.keys + head * a.key_head + page * a.key_page;
        const char *values = (const char *)a.values + head * a.value_head + page * a.value_page;
        u32 to = shared_address(ring + stage % STAGES * STAGE_BYTES) - piece * STAGE_PARTS * STEP;
#pragma unroll
        for (int j = 0; j < STAGE_PARTS; ++j) {
            int i = piece * STAGE_PARTS + j;
            bool key = PIECES == 1 ? j < PARTS : piece < PIECES / 2;
            Copied part(i);
            i64 at = (token + part.token) * (key ? a.key_token : a.value_token) + part.byte;
            copy_packed(to + part.slot * (int)sizeof(Packed), (key ? keys : values) + at);
        }
        if (CODED && lane < 2 * UNIT)
            copy_scale(
                shared_address(ring + stage % STAGES * STAGE_BYTES + ROWS + lane * 4),
                (lane < UNIT ? keys : values) + SCALES_OF_PAGE + (token + lane % UNIT) * 4
            );
    }

    template <int PIECE = 0> __device__ __forceinline__ void consume(int stage, int seen, Softmax &softmax) {
        const Packed *from = (const Packed *)(ring + stage % STAGES * STAGE_BYTES) - PIECE * STAGE_PARTS * 32;
        auto row = [=](int i) { return from[slot_of(i)]; };
        Scales scales = scales_of(ring + stage % STAGES * STAGE_BYTES + ROWS);
        if constexpr (PIECES == 1) {
            softmax.add(s.queries, seen, a.scale, a.softcap, row, scales);
        } else if constexpr (PIECE < PIECES) {
            if (stage % PIECES != PIECE) return consume<PIECE + 1>(stage, seen, softmax);
            softmax.add_parts<PIECE * STAGE_PARTS, (PIECE + 1) * STAGE_PARTS>(s.queries, row);
            if (PIECE == PIECES / 2 - 1) softmax.weigh(seen, a.scale, a.softcap, scales);
        }
    }
};
