// The program "mpi_pairs [guarded]": a process that starts MPI alone or in a world, and exchanges
// messages with other processes in pairs. benchmarks/mpi_pairs.py drives it. A pair is a
// communicator that MPI_Comm_join made, or MPI_COMM_WORLD and a rank. Sockets, pairs and requests
// have numbers, in the order in which they were made.
//
// A command is a line: a limit in seconds, a name, and words. The answer is "ok" and numbers, or
// "error" and the cause. Each command runs in a thread of its own. After the limit the answer is
// "ok -1", and the thread stays behind. Times are in microseconds. With "guarded", UCX's errors for
// a closed connection do not reach MPI, as in csrc/communicator/mpi/ucx_guard.h.
//
// Uses only C's library, and is compiled in a second.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <mpi.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr int kTag = 7;
constexpr int kMost = 8192;  // pairs, sockets, requests, words of a command, numbers of an answer

struct Pair {
  MPI_Comm comm;
  int peer;
};

struct Call {
  char line[4096];
  char* words[kMost];
  int count;  // of words
  double numbers[kMost];
  int answers;  // number of numbers
  char error[512];
  void (*run)(Call*);
};

bool guarded = false;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards the counts
Pair pairs[kMost];
int pair_count = 0;
int sockets[kMost];
int socket_count = 0;
MPI_Request requests[kMost];
int request_count = 0;
int listener = -1;

double now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) * 1e6 + static_cast<double>(at.tv_nsec) / 1e3;
}

int next(int* count) {
  pthread_mutex_lock(&mutex);
  const int found = (*count)++;
  pthread_mutex_unlock(&mutex);
  return found;
}

int number(const Call* call, int at) { return at < call->count ? atoi(call->words[at]) : 0; }

void answer(Call* call, double value) {
  if (call->answers < kMost) call->numbers[call->answers++] = value;
}

// Returns true if the call of MPI succeeded, else notes the error.
bool ok(Call* call, int error, const char* name) {
  if (error == MPI_SUCCESS) return true;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(error, text, &length);
  snprintf(call->error, sizeof call->error, "%s: %.450s", name, text);
  return false;
}

void answer_class(Call* call, int error) {
  int found = MPI_SUCCESS;
  if (error != MPI_SUCCESS) MPI_Error_class(error, &found);
  answer(call, found);
}

// start: starts MPI. Answers: time, thread level, size of the world.
void start(Call* call) {
  const double before = now();
  int provided = 0;
  int size = 0;
  if (!ok(call, MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init")) {
    return;
  }
  answer(call, now() - before);
  answer(call, provided);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  answer(call, size);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
}

// world PEER: makes a pair of MPI_COMM_WORLD. Answers: pair.
void world(Call* call) {
  const int at = next(&pair_count);
  pairs[at] = {MPI_COMM_WORLD, number(call, 0)};
  answer(call, at);
}

sockaddr_in address(const Call* call) {
  sockaddr_in found{};
  found.sin_family = AF_INET;
  found.sin_port = htons(static_cast<uint16_t>(number(call, 1)));
  inet_pton(AF_INET, call->words[0], &found.sin_addr);
  return found;
}

void add_socket(Call* call, int opened) {
  if (opened < 0) {
    snprintf(call->error, sizeof call->error, "socket: %s", strerror(errno));
    return;
  }
  const int at = next(&socket_count);
  sockets[at % kMost] = opened;
  answer(call, at);
}

// listen HOST 0. Answers: the port.
void listen_at(Call* call) {
  listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at = address(call);
  socklen_t size = sizeof at;
  if (bind(listener, reinterpret_cast<sockaddr*>(&at), size) != 0 || listen(listener, 128) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
    snprintf(call->error, sizeof call->error, "listen: %s", strerror(errno));
    return;
  }
  answer(call, ntohs(at.sin_port));
}

int accepted() { return accept4(listener, nullptr, nullptr, SOCK_CLOEXEC); }

int connected(const Call* call) {
  const int opened = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in to = address(call);
  return connect(opened, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0 ? opened : -1;
}

// accept. Answers: socket.
void accept_one(Call* call) { add_socket(call, accepted()); }

// connect HOST PORT. Answers: socket.
void connect_one(Call* call) { add_socket(call, connected(call)); }

// Joins over a socket and closes it.
bool join_over(Call* call, int socket, MPI_Comm* made) {
  *made = MPI_COMM_NULL;
  const int error = MPI_Comm_join(socket, made);
  close(socket);
  if (!ok(call, error, "MPI_Comm_join")) return false;
  if (*made != MPI_COMM_NULL) return true;
  snprintf(call->error, sizeof call->error, "MPI_Comm_join made no communicator");
  return false;
}

// join SOCKET. Answers: time, pair.
void join(Call* call) {
  MPI_Comm made;
  const double before = now();
  if (!join_over(call, sockets[number(call, 0)], &made)) return;
  const double taken = now() - before;
  MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
  const int at = next(&pair_count);
  pairs[at] = {made, 0};
  answer(call, taken);
  answer(call, at);
}

void* run(void* call) {
  static_cast<Call*>(call)->run(static_cast<Call*>(call));
  return nullptr;
}

// join2 SOCKET SOCKET: joins in two threads. Answers: a time and a pair for each.
void join2(Call* call) {
  pthread_t threads[2];
  Call* joins[2];
  for (int at = 0; at < 2; ++at) {
    joins[at] = static_cast<Call*>(calloc(1, sizeof(Call)));
    joins[at]->words[0] = call->words[at];
    joins[at]->count = 1;
    joins[at]->run = join;
    pthread_create(&threads[at], nullptr, run, joins[at]);
  }
  for (int at = 0; at < 2; ++at) {
    pthread_join(threads[at], nullptr);
    if (joins[at]->error[0] != 0) memcpy(call->error, joins[at]->error, sizeof call->error);
    for (int one = 0; one < joins[at]->answers; ++one) answer(call, joins[at]->numbers[one]);
    free(joins[at]);
  }
}

// dup PAIR. Answers: time, pair.
void dup(Call* call) {
  const Pair of = pairs[number(call, 0)];
  MPI_Comm made = MPI_COMM_NULL;
  const double before = now();
  if (!ok(call, MPI_Comm_dup(of.comm, &made), "MPI_Comm_dup")) return;
  answer(call, now() - before);
  const int at = next(&pair_count);
  pairs[at] = {made, of.peer};
  answer(call, at);
}

// round_trips PAIR BYTES FIRST SAMPLES CALLS. Answers: the times of samples.
void round_trips(Call* call) {
  const Pair to = pairs[number(call, 0)];
  const int bytes = number(call, 1);
  const bool is_first = number(call, 2) != 0;
  const int calls = number(call, 4);
  char* const data = static_cast<char*>(malloc(static_cast<size_t>(bytes)));
  memset(data, 1, static_cast<size_t>(bytes));
  for (int sample = -1; sample < number(call, 3); ++sample) {
    const double before = now();
    for (int done = 0; done < calls; ++done) {
      int error = MPI_SUCCESS;
      if (is_first) error = MPI_Send(data, bytes, MPI_BYTE, to.peer, kTag, to.comm);
      if (!ok(call, error, "MPI_Send")) return;
      error = MPI_Recv(data, bytes, MPI_BYTE, to.peer, kTag, to.comm, MPI_STATUS_IGNORE);
      if (!ok(call, error, "MPI_Recv")) return;
      if (!is_first) error = MPI_Send(data, bytes, MPI_BYTE, to.peer, kTag, to.comm);
      if (!ok(call, error, "MPI_Send")) return;
    }
    if (sample >= 0) answer(call, (now() - before) / calls);
  }
  free(data);
}

// stream PAIR BYTES FIRST SAMPLES CALLS: the first process sends CALLS messages, 8 of them in
// flight, and the second answers all of them together. Answers: the times of a message in samples.
void stream(Call* call) {
  constexpr int kInFlight = 8;
  const Pair to = pairs[number(call, 0)];
  const int bytes = number(call, 1);
  const bool sends = number(call, 2) != 0;
  const int calls = number(call, 4);
  char* const data = static_cast<char*>(malloc(static_cast<size_t>(bytes) * kInFlight));
  memset(data, 1, static_cast<size_t>(bytes) * kInFlight);
  MPI_Request open[kInFlight];
  for (int sample = -1; sample < number(call, 3); ++sample) {
    for (MPI_Request& one : open) one = MPI_REQUEST_NULL;
    const double before = now();
    for (int sent = 0; sent < calls; ++sent) {
      MPI_Request* const one = &open[sent % kInFlight];
      char* const place = data + static_cast<size_t>(sent % kInFlight) * static_cast<size_t>(bytes);
      if (!ok(call, MPI_Wait(one, MPI_STATUS_IGNORE), "MPI_Wait")) return;
      const int error = sends ? MPI_Isend(place, bytes, MPI_BYTE, to.peer, kTag, to.comm, one)
                              : MPI_Irecv(place, bytes, MPI_BYTE, to.peer, kTag, to.comm, one);
      if (!ok(call, error, "MPI_Isend or MPI_Irecv")) return;
    }
    if (!ok(call, MPI_Waitall(kInFlight, open, MPI_STATUSES_IGNORE), "MPI_Waitall")) return;
    char reply = 0;
    const int error = sends
                          ? MPI_Recv(&reply, 1, MPI_BYTE, to.peer, kTag, to.comm, MPI_STATUS_IGNORE)
                          : MPI_Send(&reply, 1, MPI_BYTE, to.peer, kTag, to.comm);
    if (!ok(call, error, "the reply")) return;
    if (sample >= 0) answer(call, (now() - before) / calls);
  }
  free(data);
}

// isend PAIR BYTES, irecv PAIR BYTES. Answers: error class, request. The buffer stays for good.
void post(Call* call, bool sends) {
  const Pair to = pairs[number(call, 0)];
  const int bytes = number(call, 1);
  char* const data = static_cast<char*>(calloc(1, static_cast<size_t>(bytes)));
  const int at = next(&request_count);
  requests[at] = MPI_REQUEST_NULL;
  answer_class(call, sends
                         ? MPI_Isend(data, bytes, MPI_BYTE, to.peer, kTag, to.comm, &requests[at])
                         : MPI_Irecv(data, bytes, MPI_BYTE, to.peer, kTag, to.comm, &requests[at]));
  answer(call, at);
}

void isend(Call* call) { post(call, true); }

void irecv(Call* call) { post(call, false); }

// test REQUEST MILLISECONDS: tests until the request is done or the time has passed. Answers: error
// class, done, cancelled.
void test(Call* call) {
  const double until = now() + number(call, 1) * 1e3;
  int error = MPI_SUCCESS;
  int done = 0;
  int cancelled = 0;
  MPI_Status status;
  memset(&status, 0, sizeof status);
  do {
    error = MPI_Test(&requests[number(call, 0)], &done, &status);
  } while (done == 0 && error == MPI_SUCCESS && now() < until);
  if (done != 0 && error == MPI_SUCCESS) MPI_Test_cancelled(&status, &cancelled);
  answer_class(call, error);
  answer(call, done);
  answer(call, cancelled);
}

// cancel REQUEST. Answers: time, error class.
void cancel(Call* call) {
  const double before = now();
  const int error = MPI_Cancel(&requests[number(call, 0)]);
  answer(call, now() - before);
  answer_class(call, error);
}

// free PAIR, disconnect PAIR. Answers: time, error class.
void leave(Call* call, bool disconnects) {
  MPI_Comm comm = pairs[number(call, 0)].comm;
  const double before = now();
  const int error = disconnects ? MPI_Comm_disconnect(&comm) : MPI_Comm_free(&comm);
  answer(call, now() - before);
  answer_class(call, error);
}

void free_pair(Call* call) { leave(call, false); }

void disconnect_pair(Call* call) { leave(call, true); }

// iprobe PAIR. Answers: error class, found.
void iprobe(Call* call) {
  const Pair of = pairs[number(call, 0)];
  int found = 0;
  answer_class(call, MPI_Iprobe(of.peer, kTag, of.comm, &found, MPI_STATUS_IGNORE));
  answer(call, found);
}

// improbe FIRST PAIRS SAMPLES CALLS: a call asks PAIRS pairs in turn for any message. Answers: the
// times of samples.
void improbe(Call* call) {
  const int first = number(call, 0);
  const int calls = number(call, 3);
  for (int sample = -1; sample < number(call, 2); ++sample) {
    const double before = now();
    for (int done = 0; done < calls; ++done) {
      for (int at = first; at < first + number(call, 1); ++at) {
        int found = 0;
        MPI_Message message;
        const int error = MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, pairs[at].comm, &found, &message,
                                      MPI_STATUS_IGNORE);
        if (!ok(call, error, "MPI_Improbe")) return;
      }
    }
    if (sample >= 0) answer(call, (now() - before) / calls);
  }
}

// finalize. Answers: time, error class.
void finalize(Call* call) {
  const double before = now();
  const int error = MPI_Finalize();
  answer(call, now() - before);
  answer(call, error);
}

// Makes up to `most` pairs, one after the other, and ends each. Answers: pairs made, mean time.
void many_joins(Call* call, int most, const char* end, bool accepts) {
  int made = 0;
  const double before = now();
  for (; made < most; ++made) {
    MPI_Comm comm;
    if (!join_over(call, accepts ? accepted() : connected(call), &comm)) break;
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    int error = MPI_SUCCESS;
    if (strcmp(end, "free") == 0) error = MPI_Comm_free(&comm);
    if (strcmp(end, "disconnect") == 0) error = MPI_Comm_disconnect(&comm);
    if (!ok(call, error, end)) break;
  }
  if (call->error[0] != 0) fprintf(stderr, "%s\n", call->error);
  call->error[0] = 0;
  answer(call, made);
  answer(call, (now() - before) / (made > 0 ? made : 1));
}

// serve_joins COUNT END, with END keep, free or disconnect.
void serve_joins(Call* call) { many_joins(call, number(call, 0), call->words[1], true); }

// ask_joins HOST PORT COUNT END.
void ask_joins(Call* call) { many_joins(call, number(call, 2), call->words[3], false); }

struct Command {
  const char* name;
  void (*run)(Call*);
};

constexpr Command kCommands[] = {
    {"start", start},
    {"world", world},
    {"listen", listen_at},
    {"accept", accept_one},
    {"connect", connect_one},
    {"join", join},
    {"join2", join2},
    {"dup", dup},
    {"round_trips", round_trips},
    {"stream", stream},
    {"isend", isend},
    {"irecv", irecv},
    {"test", test},
    {"cancel", cancel},
    {"free", free_pair},
    {"disconnect", disconnect_pair},
    {"iprobe", iprobe},
    {"improbe", improbe},
    {"serve_joins", serve_joins},
    {"ask_joins", ask_joins},
    {"finalize", finalize},
};

// Executes the command, which may outlive this function.
void execute(Call* call) {
  char* rest = nullptr;
  const char* const limit = strtok_r(call->line, " \n", &rest);
  const char* const name = strtok_r(nullptr, " \n", &rest);
  for (char* word; (word = strtok_r(nullptr, " \n", &rest)) != nullptr;) {
    call->words[call->count++] = word;
  }
  for (const Command& command : kCommands) {
    if (name != nullptr && strcmp(name, command.name) == 0) call->run = command.run;
  }
  if (call->run == nullptr) {
    printf("error no such command\n");
    return;
  }
  pthread_t thread;
  pthread_create(&thread, nullptr, run, call);
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += atoi(limit);
  if (pthread_timedjoin_np(thread, nullptr, &until) != 0) {
    printf("ok -1\n");
    return;
  }
  for (char* at = call->error; *at != 0; ++at) *at = *at == '\n' ? ' ' : *at;
  if (call->error[0] != 0) {
    printf("error %s\n", call->error);
  } else {
    printf("ok");
    for (int at = 0; at < call->answers; ++at) printf(" %.9g", call->numbers[at]);
    printf("\n");
  }
  free(call);
}

// Returns UCX's function.
template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// UCX returns a request, null for a complete one, or a status from -1 to -100.
void* without_error(void* request) {
  constexpr intptr_t kLastStatus = -100;
  const bool is_error = reinterpret_cast<uintptr_t>(request) >= static_cast<uintptr_t>(kLastStatus);
  return guarded && is_error ? nullptr : request;
}

}  // namespace

extern "C" {

using UcxSend = void* (*)(void*, const void*, size_t, uint64_t, const void*);
using UcxDisconnect = void* (*)(void*);

[[gnu::visibility("default")]] void* ucp_tag_send_nbx(void* endpoint, const void* data,
                                                      size_t count, uint64_t tag,
                                                      const void* parameters) {
  const auto send = real<UcxSend>("ucp_tag_send_nbx");
  return without_error(send(endpoint, data, count, tag, parameters));
}

[[gnu::visibility("default")]] void* ucp_tag_send_sync_nbx(void* endpoint, const void* data,
                                                           size_t count, uint64_t tag,
                                                           const void* parameters) {
  const auto send = real<UcxSend>("ucp_tag_send_sync_nbx");
  return without_error(send(endpoint, data, count, tag, parameters));
}

[[gnu::visibility("default")]] void* ucp_disconnect_nb(void* endpoint) {
  return without_error(real<UcxDisconnect>("ucp_disconnect_nb")(endpoint));
}
}

int main(int argc, char** argv) {
  guarded = argc > 1 && strcmp(argv[1], "guarded") == 0;
  for (;;) {
    Call* const call = static_cast<Call*>(calloc(1, sizeof(Call)));
    if (fgets(call->line, sizeof call->line, stdin) == nullptr) break;
    execute(call);
    fflush(stdout);
  }
  _exit(0);  // a thread may still be in MPI
}
