/* The Soft Memory Box in C: the eight functions of Ahn et al. 2018, Table 1, under the paper's
 * names. Three more functions test for a key, delete a key, and return the last error. Link with
 * -lhbmsmb.
 *
 * A process is a client of one box. Environment variables set the options:
 * - HBMCOMM_BOX: the address, smb://host:port or smb+unix:///path.
 * - HBMCOMM_BOX_TRANSPORT: auto, shm, tcp or verbs.
 * - HBMCOMM_BOX_SEAL: with a token, 1 (the default) authenticates the traffic, 0 does not. It must
 *   agree with the box's option `seal`.
 * - HBMCOMM_TOKEN: the token. If it is not set, the token is the first line of the file that
 *   HBMCOMM_TOKEN_FILE names, or else of ~/.config/hbmcomm/token.
 *
 * shm_alloc() returns the local copy of a segment: plain memory, which shm_rsync() reads from the
 * box and shm_wsync() writes to it. Functions compute the offset in the segment from a pointer into
 * the copy.
 *
 * Functions that return int return 0, or -1 with errno set; smb_exists() may also return 1.
 * smb_error() returns the text of the error. Values of errno:
 * - EINVAL: an argument or a variable is invalid, or the box refuses the request.
 * - ENOENT: no segment has the key. EEXIST: a segment has the key already.
 * - ENOMEM: the box or this process has no memory left.
 * - EACCES: the box refuses the token or the user, or the segment was attached for reading only.
 * - ENOTCONN: smb_init() was not called, or smb_terminate() was.
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
 * If `key` is NULL or *key is 0, creates a segment under a new key, and stores the key in *key.
 * Otherwise `shmflg` decides, as in shmget(2):
 * - 0: attaches to an existing segment of `size` bytes; `size` 0 accepts any size.
 * - IPC_CREAT: creates the segment if no segment has the key.
 * - IPC_CREAT | IPC_EXCL: creates the segment, or fails with EEXIST.
 * - SHM_RDONLY: shm_wsync() and shm_accum() into the segment are refused.
 * A box has keys of 128 bits: `key` gives the lower 64, and the upper 64 are 0. So Python's
 * box.alloc(size, key=key) gives the same segment. */
void* shm_alloc(uint64_t* key, uint64_t size, int shmflg);

/* Returns 1 if a segment has the key, 0 if none has it, -1 with errno set on failure. Does not
 * attach. REQUIRES: key is not 0. */
int smb_exists(uint64_t key);

/* Ends the attachment and frees the copy. If this attachment created the segment, deletes its key
 * too. Then no process can attach any more, and the box frees the segment's memory when its last
 * attachment has ended. REQUIRES: shm_alloc() returned `ptr`, or `ptr` is NULL; for NULL, the call
 * does nothing. */
void shm_free(void* ptr);

/* Deletes the key of the segment that `ptr` points into, whichever process created it: no process
 * can attach any more. Attachments and copies stay until shm_free(). The box frees the segment's
 * memory when its last attachment has ended. */
int smb_delete(void* ptr);

/* Returns the key of the segment that `ptr` points into; 0 with errno set if there is none. */
unsigned long shm_get_key(void* ptr);

/* Transfer the `size` bytes of the local copy that begin at `ptr`: shm_rsync() reads them from the
 * box, and shm_wsync() writes them to the box. */
int shm_rsync(void* ptr, size_t size);
int shm_wsync(void* ptr, size_t size);

/* Adds in the box: dst[i] += src[i], over `size` bytes of the two segments. `dst` and `src` point
 * into local copies, and so give the offsets in the segments. `type`: the element type, such as
 * SMB_FLOAT. No concurrent shm_accum() is lost. Neither reads nor changes the local copies. */
int shm_accum(void* dst, void* src, size_t size, unsigned int type);

/* Returns the error of this thread's last call, valid until its next call. */
const char* smb_error(void);

#ifdef __cplusplus
}
#endif

#endif
