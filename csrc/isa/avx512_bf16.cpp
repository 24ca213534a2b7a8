#define KVSIFT_TABLE kAvx512Bf16
#define KVSIFT_NAME "avx512_bf16"
#include "isa/kernels.inc"
