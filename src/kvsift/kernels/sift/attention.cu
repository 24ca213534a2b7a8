// Attention over listed pages: a warp takes eight tokens at a time and keeps a softmax of its own.

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }

struct Attender {
    const Arguments &a;
    const Shared &s;
    char *ring;
    u64 policy;
    int head, length, warp, step, lane;

    __device__ __forceinline__ int position(int item) {
        int unit = warp + item * step;
        return s.pages[unit / (PAGE / UNIT)] * PAGE + unit % (PAGE / UNIT) * UNIT;
    }

    __device__ __forceinline__ void request(int item) {
        int unit = warp + item * step;
        i64 page = s.physical[unit / (PAGE / UNIT)];
        int token = unit % (PAGE / UNIT) * UNIT + lane / TOKEN_LANES, byte = lane % TOKEN_LANES * 16;
        const char *key = (const char *)a.keys + head * a.key_head + page * a.key_page + byte;
        const char *value = (const char *)a.values + head * a.value_head + page * a.value_page + byte;
        u32 to = shared_address(ring + item % STAGES * STAGE_BYTES + lane * 16);
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS; ++i) {
            copy16(to + i * 512, key + (token + i * TOKENS_AT_ONCE) * a.key_token, policy);
            copy16(to + (TOKEN_STEPS + i) * 512, value + (token + i * TOKENS_AT_ONCE) * a.value_token, policy);
        }
    }

    __device__ __forceinline__ void consume(int item, float *top, float *total, float (*acc)[8]) {
        const char *from = ring + item % STAGES * STAGE_BYTES + lane * 16;
        int seen = min(UNIT, length - position(item)), part = lane % TOKEN_LANES * 8;
        float logits[G][TOKEN_STEPS];
        float4 rows[TOKEN_STEPS][2];
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS; ++i) unpack_row(from + i * 512, (float *)rows[i]);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            const float4 *q = (const float4 *)(s.queries + g * D + part);
            float4 q0 = q[0], q1 = q[1];
#pragma unroll
            for (int i = 0; i < TOKEN_STEPS; ++i) {
                float sum = dot(q0, rows[i][0]) + dot(q1, rows[i][1]);
#pragma unroll
                for (int other = TOKEN_LANES / 2; other; other >>= 1) sum += __shfl_xor_sync(~0u, sum, other);
                if (CAPPED) sum = a.softcap * tanhf(sum / a.softcap);
                logits[g][i] = i * TOKENS_AT_ONCE + lane / TOKEN_LANES < seen ? sum * LOG2E : NEGATIVE_INFINITY;
            }
        }
#pragma unroll
        for (int g = 0; g < G; ++g) {
            float best = top[g];
#pragma unroll
            for (int i = 0; i < TOKEN_STEPS; ++i) best = fmaxf(best, logits[g][i]);
#pragma unroll
            for (int other = 16; other >= TOKEN_LANES; other >>= 1)
                best = fmaxf(best, __shfl_xor_sync(~0u, best, other));
            float shrink = exp2f(top[g] - best);  // a unit holds a token, so best is finite
            top[g] = best, total[g] *= shrink;
#pragma unroll
            for (int n = 0; n < 8; ++n) acc[g][n] *= shrink;
#pragma unroll
            for (int i = 0; i < TOKEN_STEPS; ++i) total[g] += logits[g][i] = exp2f(logits[g][i] - best);
        }
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS; ++i) {
            float x[8];
            unpack_row(from + (TOKEN_STEPS + i) * 512, x);
            if (i * TOKENS_AT_ONCE + lane / TOKEN_LANES >= seen)  // what was never written may be NaN
#pragma unroll
                for (int n = 0; n < 8; ++n) x[n] = 0.f;
#pragma unroll
            for (int g = 0; g < G; ++g)
#pragma unroll
                for (int n = 0; n < 8; ++n) acc[g][n] = fmaf(logits[g][i], x[n], acc[g][n]);
        }
    }

    __device__ __forceinline__ void unpack_row(const char *from, float *x) {
        uint4 packed = *(const uint4 *)from;
        unpack2(packed.x, x[0], x[1]), unpack2(packed.y, x[2], x[3]);
        unpack2(packed.z, x[4], x[5]), unpack2(packed.w, x[6], x[7]);
    }
};
