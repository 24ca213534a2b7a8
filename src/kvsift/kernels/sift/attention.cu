// Attention over single keys and values: a warp takes eight tokens at a time and keeps a softmax of its own.

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }

struct Softmax {
    float top[G], total[G], acc[G][8];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            top[g] = NEGATIVE_INFINITY, total[g] = 0.f;
#pragma unroll
            for (int n = 0; n < 8; ++n) acc[g][n] = 0.f;
        }
    }

    // The first `seen` of eight tokens, at least one; row(i) is this lane's part of key i, row(TOKEN_STEPS + i) of value
    // i, of token i * TOKENS_AT_ONCE + lane / TOKEN_LANES.
    template <typename Row>
    __device__ __forceinline__ void add(const float *queries, int seen, float softcap, Row row) {
        int lane = threadIdx.x & 31, part = lane % TOKEN_LANES * 8;
        float logits[G][TOKEN_STEPS];
        float4 rows[TOKEN_STEPS][2];
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS; ++i) unpack_row(row(i), (float *)rows[i]);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            const float4 *q = (const float4 *)(queries + g * D + part);
            float4 q0 = q[0], q1 = q[1];
#pragma unroll
            for (int i = 0; i < TOKEN_STEPS; ++i) {
                float sum = dot(q0, rows[i][0]) + dot(q1, rows[i][1]);
#pragma unroll
                for (int other = TOKEN_LANES / 2; other; other >>= 1) sum += __shfl_xor_sync(~0u, sum, other);
                if (CAPPED) sum = softcap * tanhf(sum / softcap);
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
            float shrink = exp2f(top[g] - best);  // there is a token, so best is finite
            top[g] = best, total[g] *= shrink;
#pragma unroll
            for (int n = 0; n < 8; ++n) acc[g][n] *= shrink;
#pragma unroll
            for (int i = 0; i < TOKEN_STEPS; ++i) total[g] += logits[g][i] = exp2f(logits[g][i] - best);
        }
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS; ++i) {
            float x[8];
            unpack_row(row(TOKEN_STEPS + i), x);
            if (i * TOKENS_AT_ONCE + lane / TOKEN_LANES >= seen)  // what was never written may be NaN
#pragma unroll
                for (int n = 0; n < 8; ++n) x[n] = 0.f;
#pragma unroll
            for (int g = 0; g < G; ++g)
#pragma unroll
                for (int n = 0; n < 8; ++n) acc[g][n] = fmaf(logits[g][i], x[n], acc[g][n]);
        }
    }
};
