// Constants, arguments and shared memory of attention over given lists.

constexpr int ROWS_BYTES = UNIT * 2 * D * sizeof(Packed) / 8;   // keys and values
constexpr int STAGE_BYTES = ROWS_BYTES + (CODED ? 8 * UNIT : 0);  // and their scales
constexpr int RING_BYTES = STAGES * STAGE_BYTES;                // of a warp

struct Arguments {
    const u16 *queries, *keys, *values;
    const int *table, *lengths, *lists, *counts;
    const int *heads;        // [lists of a sequence], whose list each attends; or null: its own
    u16 *out;
    u64 *visible;            // [sequences], or null: not counted
    const float *sink;
    const int *dense_below;  // [sequences]: shorter ones are left out; or null
    i64 key_head, key_page, key_token, value_head, value_page, value_token;  // bytes
    int max_pages, num_kv_heads, capacity, share;  // units of a list; tokens of a member
    float scale, softcap;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the struct in kernels/listed_attention.py differs");

struct __align__(16) Shared {
    u16 queries[QUERY_NUMBERS];
    float record[RECORD];   // what this member leaves
    u32 of_warp[WARPS];
};
