// Tokens drawn from logits in one launch, a cluster of blocks for each sequence: `draw` of engine/sampling.py.
//
// A member of a cluster keeps its share of the logits in shared memory. What may not be drawn (min_p, then top_k, then
// top_p) becomes -inf there; of the rest the largest (logit - best) / temperature - log(-log(u)) wins. Nothing is sorted:
// the last logit that may be drawn is found by counting logits, or adding up their shares as integers, by 11, 11 and 10
// bits. Few logarithms are taken: a token wins against `least` only if 1 - u <= exp(scaled - least).
//
// Compiled for: LOGIT (float, bfloat16 or float16), MEMBERS of a cluster, THREADS of a block (1,024).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int BINS = 2048, WARPS = THREADS / 32;
constexpr float UNIT = 1099511627776.f;  // 2^40: shares are integers of this many parts of the likeliest token's
static_assert(BINS == 2 * THREADS, "a thread has two bins");

struct bfloat16 {
    unsigned short bits;
    __device__ __forceinline__ operator float() const { return __uint_as_float((u32)bits << 16); }
};
struct float16 {
    unsigned short bits;
    __device__ __forceinline__ operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};

constexpr int VECTOR = 16 / sizeof(LOGIT);
struct alignas(16) Vector {  // loaded at once
    LOGIT logits[VECTOR];
};

struct Arguments {
    const LOGIT *logits;        // [sequences, vocabulary]
    const double *temperature;  // [sequences]; 0: the likeliest
    const i64 *noise;           // [sequences]
    const double *limits;       // [3, sequences]: top_p, top_k, min_p; or null
    i64 *tokens;                // [sequences]
    double *best;               // [sequences], the largest logits; NaN if any is
    i64 row, limit_row;
    int vocabulary, share;      // logits of a member
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the struct in kernels/draw_tokens.py differs");

struct Candidate {  // a token and its number; of equal ones the first token wins
    double number;
    i64 token;
};
struct Shared {
    u64 shares[BINS];
    u32 counts[BINS];
    Candidate parts[WARPS], told[2];  // told to the other members, in turns
    u64 sums[WARPS], told_sum[2];
    u32 ties, wrong[2];
    u64 before;
    int last;
};

__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ u32 place_of(const void *at, int member) {
    u32 address = (u32)__cvta_generic_to_shared(at);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(member));
    return address;
}
__device__ __forceinline__ u64 word_of(const void *at, int member) {  // 8 bytes of another member
    u64 x;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(place_of(at, member)) : "memory");
    return x;
}
__device__ __forceinline__ u32 half_word_of(const void *at, int member) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(place_of(at, member)) : "memory");
    return x;
}

__device__ __forceinline__ bool wins(const Candidate &a, const Candidate &b) {
    return a.number > b.number || (a.number == b.number && a.token < b.token);
}

// The winner of all members, and whether any has something wrong. `turn` changes with each exchange: what was told in one
// is overwritten two later, and all have read it before the one between.
__device__ __forceinline__ Candidate best_of_all(Shared &s, Candidate own, bool &wrong, int &turn) {
    int thread = threadIdx.x, lane = thread & 31;
    for (int other = 16; other; other >>= 1) {
        Candidate its{__shfl_xor_sync(~0u, own.number, other), __shfl_xor_sync(~0u, own.token, other)};
        if (wins(its, own)) own = its;
    }
    if (lane == 0) s.parts[thread / 32] = own;
    wrong = __syncthreads_or(wrong);
    if (thread < 32) {
        own = s.parts[lane < WARPS ? lane : 0];
        for (int other = 16; other; other >>= 1) {
            Candidate its{__shfl_xor_sync(~0u, own.number, other), __shfl_xor_sync(~0u, own.token, other)};
            if (wins(its, own)) own = its;
        }
        if (thread == 0) s.told[turn] = own, s.wrong[turn] = wrong;
    }
    wait_for_cluster();
    u32 any = 0;
    for (int m = 0; m < MEMBERS; ++m) {
        Candidate its{__longlong_as_double(word_of(&s.told[turn].number, m)), (i64)word_of(&s.told[turn].token, m)};
        any |= half_word_of(&s.wrong[turn], m);
        if (m == 0 || wins(its, own)) own = its;
    }
    wrong = any, turn ^= 1;
    return own;
}

// The sum over all members, and over those in front of this one.
struct Sums {
    u64 all, before;
};
__device__ __forceinline__ Sums sum_of_all(Shared &s, u64 own, int member, int &turn) {
    int thread = threadIdx.x, lane = thread & 31;
    for (int other = 16; other; other >>= 1) own += __shfl_xor_sync(~0u, own, other);
    if (lane == 0) s.sums[thread / 32] = own;
    __syncthreads();
    if (thread < 32) {
        own = lane < WARPS ? s.sums[lane] : 0;
        for (int other = 16; other; other >>= 1) own += __shfl_xor_sync(~0u, own, other);
        if (thread == 0) s.told_sum[turn] = own;
    }
    wait_for_cluster();
    Sums sums{0, 0};
    for (int m = 0; m < MEMBERS; ++m) {
        u64 its = word_of(&s.told_sum[turn], m);
        sums.all += its;
        if (m < member) sums.before += its;
    }
    turn ^= 1;
    return sums;
}

// Integers in the order of logits; -0 and 0 are the same.
__device__ __forceinline__ u32 rank_of(float logit) {
    u32 bits = __float_as_uint(logit + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u32 rank) {
    return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}

struct Row {  // the share of a member
    float *logits;
    int count, first;  // tokens
    float best, inverse;
    double temperature;
    u64 noise;

    __device__ __forceinline__ u64 share_of(float logit) const { return (u64)(expf((logit - best) * inverse) * UNIT); }
    __device__ __forceinline__ double scaled(float logit) const { return ((double)logit - (double)best) / temperature; }
    __device__ __forceinline__ u64 mixed(i64 token) const {  // SplitMix64
        u64 x = noise + (u64)(token + 1) * 0x9e3779b97f4a7c15ull;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        return x ^ x >> 31;
    }
    __device__ __forceinline__ double gumbel(u64 mixed) const {
        return -log(-log(((double)(mixed >> 11) + 0.5) / 9007199254740992.0));
    }
};

__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); }  // -inf: such a token is not drawn

// Leaves the logits whose predecessors, in descending order and of equal ones by token, weigh less than a limit, at least
// 1; each logit weighs 1, or its share.
__device__ void leave_first(const Row &row, Shared &s, bool by_share, u64 limit, int member, int &turn) {
    int thread = threadIdx.x, lane = thread & 31;
    u32 prefix = 0, ties = 0;
    u64 before = 0;
    for (int round = 0; round < 3; ++round) {
        int shift = round == 0 ? 21 : round == 1 ? 10 : 0, bits = round == 2 ? 10 : 11;
        s.counts[thread] = s.counts[thread + THREADS] = 0, s.shares[thread] = s.shares[thread + THREADS] = 0;
        if (thread == 0) s.last = -1;
        __syncthreads();
        for (int i = thread; i < row.count; i += THREADS) {
            float logit = row.logits[i];
            u32 rank = rank_of(logit);
            if (logit == nothing() || (round && (rank ^ prefix) >> (shift + bits))) continue;
            int bin = rank >> shift & ((1 << bits) - 1);
            atomicAdd(&s.counts[bin], 1u);
            if (by_share) atomicAdd(&s.shares[bin], row.share_of(logit));
        }
        wait_for_cluster();
        u64 weights[2] = {};
        u32 counts[2] = {};
        for (int k = 0; k < 2; ++k) {
            int bin = BINS - 1 - (2 * thread + k);  // the largest logits first
            for (int m = 0; m < MEMBERS; ++m) {
                counts[k] += half_word_of(&s.counts[bin], m);
                if (by_share) weights[k] += word_of(&s.shares[bin], m);
            }
            if (!by_share) weights[k] = counts[k];
        }
        u64 inclusive = weights[0] + weights[1];
        for (int by = 1; by < 32; by *= 2) {
            u64 its = __shfl_up_sync(~0u, inclusive, by);
            if (lane >= by) inclusive += its;
        }
        if (lane == 31) s.sums[thread / 32] = inclusive;
        __syncthreads();
        u64 ahead[2] = {before + inclusive - weights[0] - weights[1], 0};
        for (int w = 0; w < thread / 32; ++w) ahead[0] += s.sums[w];
        ahead[1] = ahead[0] + weights[0];
        for (int k = 0; k < 2; ++k)
            if (counts[k] && ahead[k] < limit) atomicMax(&s.last, 2 * thread + k);
        __syncthreads();
        int last = s.last;
        if (last / 2 == thread) s.before = ahead[last & 1], s.ties = counts[last & 1];
        __syncthreads();
        before = s.before, ties = s.ties, prefix |= (u32)(BINS - 1 - last) << shift;
        wait_for_cluster();  // others have read these bins
    }
    u64 weight = by_share ? row.share_of(logit_of(prefix)) : 1;
    u64 inside = weight ? (limit - before + weight - 1) / weight : ties;  // of the equal ones
    u64 equal = 0, own = 0;
    if (inside < ties) {
        for (int i = thread; i < row.count; i += THREADS) own += rank_of(row.logits[i]) == prefix;
        equal = sum_of_all(s, own, member, turn).before;
    }
    for (int i = thread; i - thread < row.count; i += THREADS) {
        u32 rank = i < row.count ? rank_of(row.logits[i]) : 0;
        bool is_equal = i < row.count && rank == prefix;
        if (inside < ties) {
            u32 found = __ballot_sync(~0u, is_equal);
            if (lane == 0) s.sums[thread / 32] = __popc(found);
            __syncthreads();
            u64 position = equal + __popc(found & ((1u << lane) - 1));
            for (int w = 0; w < WARPS; ++w) {
                if (w < thread / 32) position += s.sums[w];
                equal += s.sums[w];
            }
            is_equal = is_equal && position < inside;
            __syncthreads();
        }
        if (i < row.count && rank <= prefix && !is_equal) row.logits[i] = nothing();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) draw_tokens(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) float logits[];
    __shared__ Shared s;
    asm volatile("griddepcontrol.wait;" ::: "memory");  // it is launched early
    int thread = threadIdx.x, member = blockIdx.x % MEMBERS, sequence = blockIdx.x / MEMBERS, turn = 0;
    Row row{logits, min(max(a.vocabulary - member * a.share, 0), a.share), member * a.share, 0.f, 0.f,
            a.temperature[sequence], (u64)a.noise[sequence]};
    const LOGIT *from = a.logits + sequence * a.row + row.first;
    float most = nothing();
    int likely = a.vocabulary;
    bool wrong = false;
    auto take = [&](int i, float logit) {
        logits[i] = logit;
        wrong |= logit != logit;
        int token = row.first + i;
        if (logit > most || (logit == most && token < likely)) most = logit, likely = token;
    };
    int vectors = (u64)from % sizeof(Vector) ? 0 : row.count / VECTOR;
    for (int i = thread; i < vectors; i += 2 * THREADS) {  // two are on their way at a time
        Vector first = ((const Vector *)from)[i], second = ((const Vector *)from)[min(i + THREADS, vectors - 1)];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) take(i * VECTOR + j, first.logits[j]);
        if (i + THREADS >= vectors) break;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) take((i + THREADS) * VECTOR + j, second.logits[j]);
    }
    for (int i = vectors * VECTOR + thread; i < row.count; i += THREADS) take(i, from[i]);
    Candidate own{most, likely};
    Candidate likeliest = best_of_all(s, own, wrong, turn);
    row.best = wrong ? __uint_as_float(0x7fc00000u) : (float)likeliest.number;
    row.inverse = 1.f / fminf(fmaxf((float)row.temperature, 1e-30f), 1e37f);  // beyond, the draw is the same
    Candidate winner{0.0, likeliest.token < a.vocabulary ? likeliest.token : 0};

    if (row.temperature > 0 && fabsf(row.best) < __uint_as_float(0x7f800000u)) {  // alike in all members
        if (a.limits) {
            double top_p = a.limits[sequence], top_k = a.limits[a.limit_row + sequence];
            double min_p = a.limits[2 * a.limit_row + sequence];
            if (min_p > 0) {
                double least = log(min_p);
                for (int i = thread; i < row.count; i += THREADS)
                    if (row.scaled(logits[i]) < least) logits[i] = nothing();
            }
            if (top_k < a.vocabulary) leave_first(row, s, false, (u64)top_k, member, turn);
            if (top_p < 1) {
                u64 sum = 0;
                for (int i = thread; i < row.count; i += THREADS) sum += row.share_of(logits[i]);
                u64 total = sum_of_all(s, sum, member, turn).all;
                // tokens below this have together less than 1 - top_p, so that none of them is drawn
                float unlikely = (float)log((1 - top_p) * ((double)total / UNIT) / a.vocabulary) - 0.01f;
                for (int i = thread; i < row.count; i += THREADS)
                    if ((logits[i] - row.best) * row.inverse < unlikely) logits[i] = nothing();
                u64 limit = (u64)ceil(top_p * (double)total);
                leave_first(row, s, true, limit ? limit : 1, member, turn);
            }
        }
        own = {row.gumbel(row.mixed(likeliest.token)), likeliest.token};  // it is never excluded
        for (int i = thread; i < row.count; i += THREADS) {
            float chance = expf(fminf((logits[i] - row.best) * row.inverse - (float)own.number, 0.f)) * 1.001f;
            u64 mixed = row.mixed(row.first + i);
            if ((float)(u32)(~mixed >> 33) * 0x1p-31f > chance || logits[i] == nothing()) continue;
            Candidate its{row.scaled(logits[i]) + row.gumbel(mixed), row.first + i};
            if (wins(its, own)) own = its;
        }
        winner = best_of_all(s, own, wrong, turn);
    }
    if (member == 0 && thread == 0) a.tokens[sequence] = winner.token, a.best[sequence] = row.best;
    wait_for_cluster();  // nobody leaves while others read what it told
}
