#include <immintrin.h>
#include <cstring>
struct E2{__m256i a,b;};
static inline E2 sp(__m512i x){E2 r;memcpy(&r,&x,64);return r;}
static inline __m512i jn(__m256i a,__m256i b){E2 r{a,b};__m512i x;memcpy(&x,&r,64);return x;}
static inline __m512i e_shuffle_epi8(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_shuffle_epi8(p.a,q.a),_mm256_shuffle_epi8(p.b,q.b));}
#define _mm512_shuffle_epi8 e_shuffle_epi8
static inline __m512i e_maddubs_epi16(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_maddubs_epi16(p.a,q.a),_mm256_maddubs_epi16(p.b,q.b));}
#define _mm512_maddubs_epi16 e_maddubs_epi16
static inline __m512i e_madd_epi16(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_madd_epi16(p.a,q.a),_mm256_madd_epi16(p.b,q.b));}
#define _mm512_madd_epi16 e_madd_epi16
static inline __m512i e_add_epi16(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_add_epi16(p.a,q.a),_mm256_add_epi16(p.b,q.b));}
#define _mm512_add_epi16 e_add_epi16
static inline __m512i e_add_epi8(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_add_epi8(p.a,q.a),_mm256_add_epi8(p.b,q.b));}
#define _mm512_add_epi8 e_add_epi8
static inline __m512i e_sub_epi16(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_sub_epi16(p.a,q.a),_mm256_sub_epi16(p.b,q.b));}
#define _mm512_sub_epi16 e_sub_epi16
static inline __m512i e_unpackhi_epi16(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_unpackhi_epi16(p.a,q.a),_mm256_unpackhi_epi16(p.b,q.b));}
#define _mm512_unpackhi_epi16 e_unpackhi_epi16
static inline __m512i e_unpacklo_epi16(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_unpacklo_epi16(p.a,q.a),_mm256_unpacklo_epi16(p.b,q.b));}
#define _mm512_unpacklo_epi16 e_unpacklo_epi16
static inline __m512i e_unpackhi_epi32(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_unpackhi_epi32(p.a,q.a),_mm256_unpackhi_epi32(p.b,q.b));}
#define _mm512_unpackhi_epi32 e_unpackhi_epi32
static inline __m512i e_unpacklo_epi32(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_unpacklo_epi32(p.a,q.a),_mm256_unpacklo_epi32(p.b,q.b));}
#define _mm512_unpacklo_epi32 e_unpacklo_epi32
static inline __m512i e_unpackhi_epi64(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_unpackhi_epi64(p.a,q.a),_mm256_unpackhi_epi64(p.b,q.b));}
#define _mm512_unpackhi_epi64 e_unpackhi_epi64
static inline __m512i e_unpacklo_epi64(__m512i x,__m512i y){E2 p=sp(x),q=sp(y);return jn(_mm256_unpacklo_epi64(p.a,q.a),_mm256_unpacklo_epi64(p.b,q.b));}
#define _mm512_unpacklo_epi64 e_unpacklo_epi64
static inline __m512i e_slli_epi16(__m512i x,int n){E2 p=sp(x);return jn(_mm256_slli_epi16(p.a,n),_mm256_slli_epi16(p.b,n));}
#define _mm512_slli_epi16 e_slli_epi16
static inline __m512i e_srli_epi16(__m512i x,int n){E2 p=sp(x);return jn(_mm256_srli_epi16(p.a,n),_mm256_srli_epi16(p.b,n));}
#define _mm512_srli_epi16 e_srli_epi16
static inline __m512i e_set1_epi16(short x){return jn(_mm256_set1_epi16(x),_mm256_set1_epi16(x));}
#define _mm512_set1_epi16 e_set1_epi16
static inline __m512i e_set1_epi8(char x){return jn(_mm256_set1_epi8(x),_mm256_set1_epi8(x));}
#define _mm512_set1_epi8 e_set1_epi8
static inline __m512i e_set1_epi32(int x){return jn(_mm256_set1_epi32(x),_mm256_set1_epi32(x));}
#define _mm512_set1_epi32 e_set1_epi32

static inline __m512i e_bc(__m128i x){return jn(_mm256_broadcastsi128_si256(x),_mm256_broadcastsi128_si256(x));}
#define _mm512_broadcast_i32x4 e_bc
#define _mm512_castsi256_si512(x) jn(x,_mm256_set1_epi8(77))
#define _mm512_castsi512_si256(x) sp(x).a
static inline __m512i e_cv8(__m256i x){return jn(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)),_mm256_cvtepi8_epi16(_mm256_extracti128_si256(x,1)));}
#define _mm512_cvtepi8_epi16 e_cv8
static inline __m512 e_cvph(__m256i x){float f[16];_mm256_storeu_ps(f,_mm256_cvtph_ps(_mm256_castsi256_si128(x)));_mm256_storeu_ps(f+8,_mm256_cvtph_ps(_mm256_extracti128_si256(x,1)));__m512 r;memcpy(&r,f,64);return r;}
#define _mm512_cvtph_ps e_cvph
static inline __m512i e_perm16(__m512i i,__m512i x){unsigned short a[32],b[32],c[32];memcpy(a,&i,64);memcpy(b,&x,64);for(int k=0;k<32;k++)c[k]=b[a[k]&31];__m512i r;memcpy(&r,c,64);return r;}
#define _mm512_permutexvar_epi16 e_perm16
static inline __m512i e_mperm16(unsigned m,__m512i i,__m512i x){__m512i r=e_perm16(i,x);unsigned short c[32];memcpy(c,&r,64);for(int k=0;k<32;k++)if(!(m>>k&1))c[k]=0;memcpy(&r,c,64);return r;}
#define _mm512_maskz_permutexvar_epi16 e_mperm16
static inline __m512i e_setr(int a,int b,int c,int d,int e,int f,int g,int h,int i,int j,int k,int l,int m,int n,int o,int p){int v[16]={a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p};__m512i r;memcpy(&r,v,64);return r;}
#define _mm512_setr_epi32 e_setr
static inline __m512 jf(__m256 a,__m256 b){__m512 r;memcpy(&r,&a,32);memcpy((char*)&r+32,&b,32);return r;}
static inline __m256 fa(__m512 x){__m256 r;memcpy(&r,&x,32);return r;} static inline __m256 fb(__m512 x){__m256 r;memcpy(&r,(char*)&x+32,32);return r;}
#define _mm512_add_ps(x,y) jf(_mm256_add_ps(fa(x),fa(y)),_mm256_add_ps(fb(x),fb(y)))
#define _mm512_unpacklo_ps(x,y) jf(_mm256_unpacklo_ps(fa(x),fa(y)),_mm256_unpacklo_ps(fb(x),fb(y)))
#define _mm512_unpackhi_ps(x,y) jf(_mm256_unpackhi_ps(fa(x),fa(y)),_mm256_unpackhi_ps(fb(x),fb(y)))
#define _mm512_castps_pd(x) ((__m512d)(x))
#define _mm512_castpd_ps(x) ((__m512)(x))
#define _mm512_unpacklo_pd(x,y) ((__m512d)jf((__m256)_mm256_unpacklo_pd((__m256d)fa((__m512)x),(__m256d)fa((__m512)y)),(__m256)_mm256_unpacklo_pd((__m256d)fb((__m512)x),(__m256d)fb((__m512)y))))
#define _mm512_unpackhi_pd(x,y) ((__m512d)jf((__m256)_mm256_unpackhi_pd((__m256d)fa((__m512)x),(__m256d)fa((__m512)y)),(__m256)_mm256_unpackhi_pd((__m256d)fb((__m512)x),(__m256d)fb((__m512)y))))
static inline __m512 e_sh(__m512 a,__m512 b,int im){float x[16],y[16],z[16];memcpy(x,&a,64);memcpy(y,&b,64);for(int l=0;l<4;l++){int s=im>>(2*l)&3;memcpy(z+4*l,(l<2?x:y)+4*s,16);}__m512 r;memcpy(&r,z,64);return r;}
#define _mm512_shuffle_f32x4 e_sh
static inline __m128 e_c(__m512 a){return _mm256_castps256_ps128(fa(a));}
#define _mm512_castps512_ps128 e_c


#define __AVX512F__ 1
#define KVSIFT_TABLE kAvx512
#include "isa/isa.hpp"
namespace kvsift { namespace {
#include "isa/vectors.inc"
constexpr int padded_width(int width) { return (width + kQueryPad - 1) / kQueryPad * kQueryPad; }
constexpr int kBytesAhead = 12288;
KVSIFT_INLINE void fetch(const void* row, int bytes) { for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at, 0, 2); }
#include "sketch_codes_emu.inc"
#include "isa/sketch.inc"
#include "isa/sketch_values.inc"
static std::int64_t above(const float* s, std::int64_t n, float t, std::int32_t* p){std::int64_t k=0;for(std::int64_t i=0;i<n;++i)if(s[i]>t)p[k++]=i;return k;}
}
extern const Kernels kAvx512;
const Kernels kAvx512={"avx512-emulated",nullptr,nullptr,nullptr,above,nullptr,sketch_weights,sketch_votes,set_maxima,sketch_values};
}
