/* The Soft Memory Box in C: the eight functions of Ahn et al. 2018, Table 1, under the paper's
 * names. Three more functions test for a key, delete a key, and return the last error. Link with
 * -lhbmsmb.
 *
 * A process is a client of one box. Environment variables set the options:
 * - HBMCOMM_BOX: the address, smb://host:port or smb+unix:///path.
 * - HBMCOMM_BOX_TRANSPORT: auto, shm, tcp or verbs.
 * - HBMCOMM_BOX_SEAL: 1 authenticates the traffic with a token, 0 does not; as the box.
 * - HBMCOMM_TOKEN, or the file HBMCOMM_TOKEN_FILE, or ~/.config/hbmcomm/token: the token.
 *
 * shm_alloc() returns the local copy of a segment: plain memory, which shm_rsync() reads from the
 * box and shm_wsync() writes to it. Functions compute the offset in the segment from a pointer into
 * the copy.
 *
 * Functions that return int return 0, or -1 with errno set. smb_error() returns the text.
 * - EINVAL: invalid argument. ENOENT, EEXIST: the key. ENOMEM: the box is full.
 * - EACCES: the token, or read-only. ENOTCONN: before smb_init().
 * - EIDRM: the box has lost the segment. EIO: the box cannot be reached.
 *
 * Threads: any, between smb_init() and smb_terminate().
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

/* Returns the zero-filled local copy of a segment of `size` bytes, or NULL with errno set.
 * - `key` NULL or *key == 0: creates a segment under a new key, stored in *key.
 * - shmflg 0, as in shmget(2): attaches to an existing segment of `size` bytes (0: any size).
 * - IPC_CREAT: creates the segment if no segment has the key.
 * - IPC_CREAT | IPC_EXCL: creates the segment, or fails with EEXIST.
 * - SHM_RDONLY: shm_wsync() and shm_accum() into the segment are refused.
 * A key is the 128 bits 0:key at the box, as with Python's box.alloc(size, key=key). */
void* shm_alloc(uint64_t* key, uint64_t size, int shmflg);

/* Returns 1 if a segment has the key, 0 if none has it, -1 with errno set on failure. Does not
 * attach. REQUIRES: key is not 0. */
int smb_exists(uint64_t key);

/* Ends the attachment and frees the copy. In the process that created the segment, deletes its key
 * too: no process can attach any more, and the last attachment frees the memory. `ptr`: returned by
 * shm_alloc(); NULL does nothing. */
void shm_free(void* ptr);

/* Deletes the key of the segment that `ptr` points into, whichever process created it: no process
 * can attach any more. Attachments and copies stay until shm_free(); the last attachment frees the
 * memory. */
int smb_delete(void* ptr);

/* Returns the key of the segment that `ptr` points into; 0 with errno set if there is none. */
unsigned long shm_get_key(void* ptr);

/* Copy `size` bytes from `ptr` on: shm_rsync() from the box to the local copy, shm_wsync() from the
 * local copy to the box. */
int shm_rsync(void* ptr, size_t size);
int shm_wsync(void* ptr, size_t size);

/* Adds on the box: dst[i] += src[i], over `size` bytes from the offsets of the pointers. Loses no
 * concurrent shm_accum(). Does not change the copies. */
int shm_accum(void* dst, void* src, size_t size, unsigned int type);

/* Returns the error of this thread's last call, valid until its next call. */
const char* smb_error(void);

#ifdef __cplusplus
}
#endif

#endif
