/* The few calls of cuBLAS and cuBLASLt that have to answer something; all others succeed (see __main__.py).

   Without their headers, which want a compiler for CUDA. */
#include <stddef.h>
#include <string.h>

static int handle;

int cublasCreate_v2(void **made) { *made = &handle; return 0; }
int cublasLtCreate(void **made) { *made = &handle; return 0; }
int cublasGetMathMode(void *one, int *mode) { (void)one; *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *one, int *mode) { (void)one; *mode = 0; return 0; }

struct heuristic { /* cublasLtMatmulHeuristicResult_t */
    unsigned long long algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *one, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, struct heuristic *found, int *count) {
    (void)one; (void)product; (void)a; (void)b; (void)c; (void)d; (void)preference;
    memset(found, 0, (size_t)asked * sizeof *found);
    *count = 1;
    return 0;
}
