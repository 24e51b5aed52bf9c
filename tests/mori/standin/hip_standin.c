/* A stand-in for libamdhip64.so.7 with which MORI's XGMI backend runs on a machine without a GPU.
 *
 * It replaces the HIP runtime and its devices: two devices, or as many as HIP_STANDIN_DEVICES says, that have no memory of
 * their own. "Device memory" is a part of one memfd of this process, which programs can look into; an IPC handle names the
 * process, the descriptor and the part, so that it goes with its owner as a real one does, and nothing is left in /dev/shm;
 * copies are made by one thread in the order in which they were asked for, and an event is over when that thread has come
 * to it. It shows how MORI's own code behaves (descriptors, sessions, batches, status objects), not what a GPU, its driver
 * or XGMI links do: no speed, no ordering between devices, nothing of what becomes of a copy when its process ends.
 *
 * Tests may hold copies back, and let some be refused: the functions standin_... below.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCKS = 4096, HANDLE_BYTES = 64, PAGE = 4096 };
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NO_DEVICES = 100, NO_DEVICE = 101, NOT_READY = 600, UNKNOWN = 999 };

/* what is allocated here, or mapped from another process */
struct block {
  char *start;
  size_t nbytes;
  off_t at;
  int is_own;
};

struct handle {
  int pid, fd;
  off_t at;
  size_t nbytes;
  dev_t file_system;
  ino_t file;
};

struct opaque_handle {
  char bytes[HANDLE_BYTES];
};

static struct block blocks[BLOCKS];
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;
static int memory_fd = -1;
static off_t memory_end;

static struct block *block_at(const void *address) {
  const char *at = address;
  for (int i = 0; i < BLOCKS; i++)
    if (blocks[i].start && at >= blocks[i].start && at < blocks[i].start + blocks[i].nbytes) return &blocks[i];
  return NULL;
}

static int map_block(int fd, off_t at, size_t nbytes, int is_own, void **start) {
  for (int i = 0; i < BLOCKS; i++) {
    if (blocks[i].start) continue;
    char *mapped = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, at);
    if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
    blocks[i] = (struct block){mapped, nbytes, at, is_own};
    *start = mapped;
    return OK;
  }
  return OUT_OF_MEMORY;
}

static int unmap_block(void *start, int is_own) {
  pthread_mutex_lock(&blocks_lock);
  struct block *found = block_at(start);
  int status = found && found->start == start && found->is_own == is_own ? OK : INVALID_VALUE;
  if (status == OK) {
    munmap(found->start, found->nbytes);
    if (is_own) fallocate(memory_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, found->at, (off_t)found->nbytes);
    found->start = NULL;
  }
  pthread_mutex_unlock(&blocks_lock);
  return status;
}

/* -- devices */

static int devices(void) {
  const char *text = getenv("HIP_STANDIN_DEVICES");
  return text ? atoi(text) : 2;
}

int hipGetDeviceCount(int *count) {
  *count = devices();
  return *count ? OK : NO_DEVICES;
}

int hipSetDevice(int device) {
  if (device < 0 || device >= devices()) return NO_DEVICE;
  current_device = device;
  return OK;
}

int hipGetDevice(int *device) {
  *device = current_device;
  return OK;
}

int hipDeviceGetPCIBusId(char *text, int size, int device) {
  if (device < 0 || device >= devices()) return NO_DEVICE;
  snprintf(text, (size_t)size, "0000:%02x:00.0", device + 1);
  return OK;
}

int hipDeviceCanAccessPeer(int *can, int device, int peer) {
  (void)device, (void)peer;
  *can = 1;
  return OK;
}

int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  (void)peer, (void)flags;
  return OK;
}

int hipGetLastError(void) { return OK; }

const char *hipGetErrorString(int status) { return status == OK ? "no error" : "an error of the stand-in for HIP"; }

int hipRuntimeGetVersion(int *version) {
  *version = 70000000;
  return OK;
}

/* -- memory */

int hipMalloc(void **start, size_t nbytes) {
  int status = OUT_OF_MEMORY;
  pthread_mutex_lock(&blocks_lock);
  if (memory_fd < 0) memory_fd = memfd_create("hip-standin", MFD_CLOEXEC);
  off_t at = memory_end, end = at + ((off_t)nbytes + PAGE - 1) / PAGE * PAGE;
  if (memory_fd >= 0 && !ftruncate(memory_fd, end)) {
    memory_end = end; /* places are not used again: a handle that was kept must not lead to other memory */
    status = map_block(memory_fd, at, nbytes, 1, start);
  }
  pthread_mutex_unlock(&blocks_lock);
  return status;
}

int hipMemGetAddressRange(void **start, size_t *nbytes, void *address) {
  pthread_mutex_lock(&blocks_lock);
  struct block *found = block_at(address);
  if (found) *start = found->start, *nbytes = found->nbytes;
  pthread_mutex_unlock(&blocks_lock);
  return found ? OK : INVALID_VALUE;
}

int hipIpcGetMemHandle(struct opaque_handle *handle, void *start) {
  struct stat file;
  pthread_mutex_lock(&blocks_lock);
  struct block *found = block_at(start);
  int status = found && found->is_own && !fstat(memory_fd, &file) ? OK : INVALID_VALUE;
  if (status == OK) {
    struct handle said = {getpid(), memory_fd, found->at, found->nbytes, file.st_dev, file.st_ino};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &said, sizeof said);
  }
  pthread_mutex_unlock(&blocks_lock);
  return status;
}

int hipIpcOpenMemHandle(void **start, struct opaque_handle handle, unsigned flags) {
  (void)flags;
  struct handle said;
  struct stat file;
  char path[64];
  memcpy(&said, &handle, sizeof said);
  if (said.pid == getpid()) return INVALID_CONTEXT; /* as HIP: a process can't open its own */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", said.pid, said.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return INVALID_VALUE;
  int status = INVALID_VALUE;
  if (!fstat(fd, &file) && file.st_dev == said.file_system && file.st_ino == said.file) {
    pthread_mutex_lock(&blocks_lock);
    status = map_block(fd, said.at, said.nbytes, 0, start);
    pthread_mutex_unlock(&blocks_lock);
  }
  close(fd);
  return status;
}

/* -- copies: one thread, first come, first served; a task without bytes is the record of an event */

struct event {
  int is_over;
};

struct task {
  void *to;
  const void *from;
  size_t nbytes;
  struct event *event;
  struct task *next;
};

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_grew = PTHREAD_COND_INITIALIZER, queue_shrank = PTHREAD_COND_INITIALIZER;
static struct task *first_task, *last_task;
static int is_running, is_busy;
static unsigned is_held, refused;

/* begin no copy until this is called with 0 */
void standin_hold_copies(unsigned hold) {
  pthread_mutex_lock(&queue_lock);
  is_held = hold;
  pthread_cond_signal(&queue_grew);
  pthread_mutex_unlock(&queue_lock);
}

/* refuse the next copies, so many of them */
void standin_refuse_copies(unsigned count) {
  pthread_mutex_lock(&queue_lock);
  refused = count;
  pthread_mutex_unlock(&queue_lock);
}

static void *copy_tasks(void *nothing) {
  pthread_mutex_lock(&queue_lock);
  for (;;) {
    while (!first_task || is_held) pthread_cond_wait(&queue_grew, &queue_lock);
    struct task *task = first_task;
    if (!(first_task = task->next)) last_task = NULL;
    is_busy = 1;
    pthread_mutex_unlock(&queue_lock);
    if (task->nbytes) memmove(task->to, task->from, task->nbytes);
    pthread_mutex_lock(&queue_lock);
    is_busy = 0;
    if (task->event) task->event->is_over = 1;
    pthread_cond_broadcast(&queue_shrank);
    free(task);
  }
  return nothing;
}

static int enqueue(void *to, const void *from, size_t nbytes, struct event *event) {
  struct task *task = malloc(sizeof *task);
  if (!task) return OUT_OF_MEMORY;
  *task = (struct task){to, from, nbytes, event, NULL};
  pthread_mutex_lock(&queue_lock);
  if (nbytes && refused) {
    refused--;
    pthread_mutex_unlock(&queue_lock);
    free(task);
    return UNKNOWN;
  }
  if (!is_running) {
    pthread_t thread;
    is_running = !pthread_create(&thread, NULL, copy_tasks, NULL);
    if (is_running) pthread_detach(thread);
  }
  if (event) event->is_over = 0;
  if (last_task)
    last_task->next = task;
  else
    first_task = task;
  last_task = task;
  pthread_cond_signal(&queue_grew);
  pthread_mutex_unlock(&queue_lock);
  return OK;
}

static int wait_until_idle(void) {
  pthread_mutex_lock(&queue_lock);
  while (first_task || is_busy) pthread_cond_wait(&queue_shrank, &queue_lock);
  pthread_mutex_unlock(&queue_lock);
  return OK;
}

int hipMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream) {
  (void)kind, (void)stream;
  return enqueue(to, from, nbytes, NULL);
}

int hipMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t nbytes, void *stream) {
  (void)to_device, (void)from_device, (void)stream;
  return enqueue(to, from, nbytes, NULL);
}

int hipMemcpy(void *to, const void *from, size_t nbytes, int kind) {
  (void)kind;
  wait_until_idle();
  memmove(to, from, nbytes);
  return OK;
}

int hipDeviceSynchronize(void) { return wait_until_idle(); }

/* as HIP: memory goes when nothing uses it any more */

int hipFree(void *start) {
  wait_until_idle();
  return start ? unmap_block(start, 1) : OK;
}

int hipIpcCloseMemHandle(void *start) {
  wait_until_idle();
  return unmap_block(start, 0);
}

/* -- streams and events */

int hipStreamCreateWithFlags(void **stream, unsigned flags) {
  (void)flags;
  return (*stream = malloc(1)) ? OK : OUT_OF_MEMORY;
}

int hipStreamDestroy(void *stream) {
  wait_until_idle();
  free(stream);
  return OK;
}

int hipStreamSynchronize(void *stream) {
  (void)stream;
  return wait_until_idle();
}

int hipEventCreateWithFlags(struct event **event, unsigned flags) {
  (void)flags;
  if (!(*event = malloc(sizeof **event))) return OUT_OF_MEMORY;
  (*event)->is_over = 1;
  return OK;
}

int hipEventDestroy(struct event *event) {
  wait_until_idle();
  free(event);
  return OK;
}

int hipEventRecord(struct event *event, void *stream) {
  (void)stream;
  return enqueue(NULL, NULL, 0, event);
}

int hipEventQuery(struct event *event) {
  pthread_mutex_lock(&queue_lock);
  int is_over = event->is_over;
  pthread_mutex_unlock(&queue_lock);
  return is_over ? OK : NOT_READY;
}

int hipEventSynchronize(struct event *event) {
  pthread_mutex_lock(&queue_lock);
  while (!event->is_over) pthread_cond_wait(&queue_shrank, &queue_lock);
  pthread_mutex_unlock(&queue_lock);
  return OK;
}

/* -- what is called while MORI's libraries are loaded */

void **__hipRegisterFatBinary(const void *data) {
  static void *module;
  (void)data;
  return &module;
}

void __hipRegisterFunction(void) {}

void __hipUnregisterFatBinary(void **module) { (void)module; }
