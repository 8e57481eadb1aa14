/* Workers add their gradients to weights that they share in a memory box, in C.
 *
 *     pkg=$(python -c 'import torch_hbmcomm; print(torch_hbmcomm.__path__[0])')
 *     cc examples/memory_box.c -I"$pkg/include" -L"$pkg" -Wl,-rpath,"$pkg" -lhbmsmb -o memory_box
 *     hbmcomm serve --listen 127.0.0.1:7777 --memory 64MiB &
 *     HBMCOMM_BOX=smb://127.0.0.1:7777 ./memory_box 4
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "smb.h"

enum { kNumbers = 1 << 16, kSteps = 10 };
static const size_t kBytes = kNumbers * sizeof(float);

static void need(int good, const char* what) {
  if (good) return;
  fprintf(stderr, "%s: %s (%s)\n", what, smb_error(), strerror(errno));
  exit(1);
}

/* Runs one worker. All workers share one segment for weights; each has its own for gradients. */
static void work(uint64_t key) {
  need(smb_init() == 0, "smb_init");
  float* weights = shm_alloc(&key, kBytes, 0);
  need(weights != NULL, "shm_alloc (weights)");
  float* gradients = shm_alloc(NULL, kBytes, IPC_CREAT);
  need(gradients != NULL, "shm_alloc (gradients)");
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kNumbers; ++i) gradients[i] = 1.0f;
    need(shm_wsync(gradients, kBytes) == 0, "shm_wsync");
    need(shm_accum(weights, gradients, kBytes, SMB_FLOAT) == 0, "shm_accum");
    need(shm_rsync(weights, kBytes) == 0, "shm_rsync");
  }
  shm_free(gradients);
  shm_free(weights);
  smb_terminate();
}

int main(int argc, char** argv) {
  const int workers = argc > 1 ? atoi(argv[1]) : 2;
  if (workers < 1 || workers > 64) {
    fprintf(stderr, "usage: %s WORKERS (1 to 64)\n", argv[0]);
    return 2;
  }
  /* The master allocates the weights and sends their key to the workers, here through a pipe. */
  int key_pipe[2];
  if (pipe(key_pipe) != 0) return 1;
  for (int i = 0; i < workers; ++i) {
    if (fork() == 0) {
      uint64_t key = 0;
      if (read(key_pipe[0], &key, sizeof key) != sizeof key) _exit(1);
      work(key);
      exit(0);
    }
  }
  need(smb_init() == 0, "smb_init");
  uint64_t key = 0;
  float* weights = shm_alloc(&key, kBytes, IPC_CREAT);
  need(weights != NULL, "shm_alloc");
  for (int i = 0; i < workers; ++i) {
    if (write(key_pipe[1], &key, sizeof key) != sizeof key) return 1;
  }
  close(key_pipe[1]);
  int failed = 0;
  for (int i = 0; i < workers; ++i) {
    int status = 0;
    wait(&status);
    failed += status != 0;
  }
  need(shm_rsync(weights, kBytes) == 0, "shm_rsync");
  printf("%d workers, %d steps each: every weight is %g\n", workers, kSteps, weights[0]);
  int wrong = 0;
  for (int i = 0; i < kNumbers; ++i) wrong += weights[i] != (float)(workers * kSteps);
  shm_free(weights); /* deletes the segment: this process created it */
  smb_terminate();
  return failed != 0 || wrong != 0;
}
