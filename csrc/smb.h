/* The Soft Memory Box in C: the eight functions of Ahn et al. 2018, Table 1, under the paper's
 * names. Three more ask whether a key is in use, delete, and say what went wrong. Link with
 * -lhbmsmb.
 *
 * A process is a client of one box, named by the environment: HBMCOMM_BOX (smb://host:port or
 * smb+unix:///path), HBMCOMM_BOX_TRANSPORT (auto, shm, tcp or verbs), HBMCOMM_BOX_SEAL (1, or 0 as
 * the box has it), and the token by HBMCOMM_TOKEN, HBMCOMM_TOKEN_FILE or ~/.config/hbmcomm/token.
 *
 * shm_alloc() gives the local copy of a segment of the box: plain memory, which shm_rsync() fills
 * from the box and shm_wsync() writes to it. Offsets follow from pointers: any pointer into the
 * copy will do.
 *
 * Functions that return int return 0, or -1 with errno set: EINVAL (arguments), ENOENT, EEXIST
 * (keys), ENOMEM (the box is full), EACCES (the token, or read-only), ENOTCONN (before smb_init()),
 * EIDRM (the box has lost the segment), EIO (the box cannot be reached). smb_error() has the words.
 *
 * Threads: any, at any time between smb_init() and smb_terminate().
 */
#ifndef HBM_SMB_H
#define HBM_SMB_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ipc.h> /* IPC_CREAT, IPC_EXCL */
#include <sys/shm.h> /* SHM_RDONLY */

#ifdef __cplusplus
extern "C" {
#endif

/* Element types of shm_accum(). The paper has FLOAT and DOUBLE. */
#define SMB_FLOAT 1u  /* 32 bits */
#define SMB_DOUBLE 2u /* 64 bits */
#define SMB_BFLOAT16 3u
#define SMB_FLOAT16 4u
#define SMB_INT32 5u
#define SMB_INT64 6u

/* Connects to the box. A second call before smb_terminate() does nothing. */
int smb_init(void);

/* Ends all attachments and the connection; local copies are freed. */
void smb_terminate(void);

/* A segment of `size` bytes, as its local copy, of zeros; NULL with errno set on failure.
 * `key`: NULL or *key == 0: a new segment under a key that nothing else has, stored in *key.
 * Otherwise by shmflg, as in shmget(2): 0 attaches to what another process made (its size must be
 * `size`, or `size` 0), IPC_CREAT makes it if nothing has the key, IPC_CREAT | IPC_EXCL makes it or
 * fails with EEXIST. SHM_RDONLY: shm_wsync() and shm_accum() into it are refused.
 * The box knows a key as the 128 bits 0:key, so Python's box.alloc(size, key=key) is the same. */
void* shm_alloc(uint64_t* key, uint64_t size, int shmflg);

/* 1: a segment has the key. 0: none has it. -1 with errno set: that is not known. Attaches to
 * nothing. `key`: not 0. */
int smb_exists(uint64_t key);

/* Ends the attachment and frees the copy. In the process that made the segment it is deleted too:
 * nobody can attach any more, and its memory goes with the last attachment. `ptr`: as shm_alloc()
 * returned it; NULL does nothing. */
void shm_free(void* ptr);

/* Takes the key of the segment that `ptr` points into away, whoever made it: nobody can attach any
 * more. Attachments and copies stay until shm_free(), and the memory goes with the last of them. */
int smb_delete(void* ptr);

/* The key of the segment that `ptr` points into; 0 with errno set if it points into none. */
unsigned long shm_get_key(void* ptr);

/* Box to copy, copy to box: `size` bytes from `ptr` on. */
int shm_rsync(void* ptr, size_t size);
int shm_wsync(void* ptr, size_t size);

/* On the box: dst[i] += src[i], over `size` bytes from where the pointers point into their copies.
 * No concurrent shm_accum() is lost. The copies do not change. */
int shm_accum(void* dst, void* src, size_t size, unsigned int type);

/* Why the last call of this thread failed. The text stays until the thread's next call. */
const char* smb_error(void);

#ifdef __cplusplus
}
#endif

#endif
