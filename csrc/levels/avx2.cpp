#define KVSIFT_TABLE kAvx2
#define KVSIFT_NAME "avx2"
#include "levels/kernels.inc"
