/* FlashAttention's loop in C, for a simulated cache to watch: `io_model.py --cachegrind`.

     loops N d B      B = 0: fill Q, K and V, and attend to nothing

   Queries outside, tiles of B x B: 2307.08691, Algorithm 1. float32. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **argv) {
    if (count != 4) return 2;
    const int N = atoi(argv[1]), d = atoi(argv[2]), B = atoi(argv[3]);
    float *X[4];  /* Q, K, V, O */
    for (int x = 0; x < 4; x++) {
        X[x] = aligned_alloc(64, (size_t)N * d * sizeof(float));
        for (int i = 0; i < N * d; i++) X[x][i] = x < 3 ? sinf(i + x) : 0;
    }
    float *S = malloc((B * B + 2 * B) * sizeof(float)), *m = S + B * B, *l = m + B;
    for (int i = 0; B && i < N; i += B) {
        const int R = i + B < N ? B : N - i;
        float *Q = X[0] + (size_t)i * d, *O = X[3] + (size_t)i * d;
        for (int r = 0; r < R; r++) m[r] = -INFINITY, l[r] = 0;
        for (int j = 0; j < N; j += B) {
            const int C = j + B < N ? B : N - j;
            const float *K = X[1] + (size_t)j * d, *V = X[2] + (size_t)j * d;
            for (int r = 0; r < R; r++) {
                float m_new = m[r];
                for (int c = 0; c < C; c++) {
                    float sum = 0;
                    for (int k = 0; k < d; k++) sum += Q[r * d + k] * K[c * d + k];
                    S[r * B + c] = sum / sqrtf(d);
                    m_new = fmaxf(m_new, S[r * B + c]);
                }
                const float correction = expf(m[r] - m_new);
                m[r] = m_new, l[r] *= correction;
                for (int k = 0; k < d; k++) O[r * d + k] *= correction;
                for (int c = 0; c < C; c++) l[r] += S[r * B + c] = expf(S[r * B + c] - m_new);
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++)
                    for (int k = 0; k < d; k++) O[r * d + k] += S[r * B + c] * V[c * d + k];
        }
        for (int r = 0; r < R; r++)
            for (int k = 0; k < d; k++) O[r * d + k] /= l[r];
    }
    printf("%.9g\n", X[3][(size_t)N * d - 1]);
    return 0;
}
