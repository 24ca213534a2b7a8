#define KVSIFT_TABLE kAvx512
#define KVSIFT_NAME "avx512"
#include "levels/kernels.inc"
