#include "communicator/mpi/pmi.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace hbm::communicator::mpi {
namespace {

constexpr const char* kMappingKey = "PMI_process_mapping";

// Returns the value of `name=` in a PMI-1 line; empty if absent. A value ends at a space, but
// "value" extends to the end of the line.
std::string field(const std::string& line, const std::string& name) {
  size_t at = line.find(name + "=");
  while (at != std::string::npos && at != 0 && line[at - 1] != ' ') {
    at = line.find(name + "=", at + 1);
  }
  if (at == std::string::npos) return {};
  const size_t start = at + name.size() + 1;
  const size_t end = name == "value" ? line.size() : std::min(line.find(' ', start), line.size());
  return line.substr(start, end - start);
}

void clear_environment() {
  for (const char* name : {"PMI_FD", "PMI_RANK", "PMI_SIZE"}) unsetenv(name);
}

}  // namespace

std::string process_mapping(const std::vector<int>& node_of) {
  std::string mapping = "(vector";
  for (size_t first = 0; first < node_of.size();) {
    size_t end = first;
    while (end < node_of.size() && node_of[end] == node_of[first]) ++end;
    mapping += ",(" + std::to_string(node_of[first]) + ",1," + std::to_string(end - first) + ")";
    first = end;
  }
  return mapping + ")";
}

PmiResponder::PmiResponder(std::shared_ptr<bootstrap::KeyValue> store, Job job)
    : store_(std::move(store)), job_(std::move(job)), mapping_(process_mapping(job_.node_of)) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("socketpair for the PMI responder: ") + std::strerror(errno));
  }
  client_ = ends[0];
  server_ = ends[1];
  setenv("PMI_FD", std::to_string(client_).c_str(), 1);
  setenv("PMI_RANK", std::to_string(job_.rank).c_str(), 1);
  setenv("PMI_SIZE", std::to_string(job_.size).c_str(), 1);
  thread_ = std::thread([this] { serve(); });
}

PmiResponder::~PmiResponder() {
  clear_environment();
  is_ending_ = true;
  shutdown(server_, SHUT_RD);  // wakes the thread's read
  thread_.join();
  if (!job_.is_elsewhere) return;
  close(client_);
  close(server_);
}

void PmiResponder::release_store() {
  clear_environment();
  const std::lock_guard lock(mutex_);
  store_.reset();
}

std::shared_ptr<bootstrap::KeyValue> PmiResponder::store() {
  const std::lock_guard lock(mutex_);
  return store_;
}

void PmiResponder::serve() {
  std::string input;
  char chunk[4096];
  for (;;) {
    const ssize_t got = read(server_, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    input.append(chunk, static_cast<size_t>(got));
    for (size_t end; (end = input.find('\n')) != std::string::npos; input.erase(0, end + 1)) {
      std::string reply;
      try {
        reply = answer(input.substr(0, end)) + "\n";
      } catch (const std::exception& error) {
        if (is_ending_) return;
        log::error(std::string("the PMI responder stops: ") + error.what());
        return;  // MPI_Init hangs; its caller gives up at the deadline and reports an error
      }
      for (size_t sent = 0; sent < reply.size();) {
        const ssize_t n = send(server_, reply.data() + sent, reply.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR) return;
        if (n > 0) sent += static_cast<size_t>(n);
      }
    }
  }
}

std::string PmiResponder::answer(const std::string& line) {
  log::debug("PMI: " + line);
  const std::string command = field(line, "cmd");
  const std::shared_ptr<bootstrap::KeyValue> store = this->store();
  if (command == "init") return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0";
  if (command == "get_maxes") return "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=4096 rc=0";
  if (command == "get_appnum") return "cmd=appnum appnum=0 rc=0";
  if (command == "get_my_kvsname") return "cmd=my_kvsname kvsname=" + job_.name + " rc=0";
  if (command == "get_universe_size") {
    return "cmd=universe_size size=" + std::to_string(job_.size) + " rc=0";
  }
  if (command == "put" && store) {
    store->set(job_.name + "/" + field(line, "key"), field(line, "value"), job_.deadline);
    return "cmd=put_result rc=0 msg=success";
  }
  if (command == "get") {
    const std::string key = field(line, "key");
    std::optional<std::string> value;
    if (key == kMappingKey) {
      value = mapping_;
    } else if (store) {
      value = store->get(job_.name + "/" + key, job_.deadline);
    }
    if (!value) return "cmd=get_result rc=-1 msg=key_not_found value=unknown";
    return "cmd=get_result rc=0 msg=success value=" + *value;
  }
  if (command == "barrier_in") {
    if (store && !barrier(*store))
      throw Error(ErrorKind::kTimeout, "a PMI barrier was not joined by every rank");
    return "cmd=barrier_out rc=0";
  }
  if (command == "finalize") return "cmd=finalize_ack rc=0";
  throw Error(ErrorKind::kUnsupported, "MPI asked \"" + line + "\", which PMI-1 does not know");
}

bool PmiResponder::barrier(bootstrap::KeyValue& store) {
  const std::string prefix = job_.name + "/barrier" + std::to_string(barriers_++);
  if (store.add(prefix, 1, job_.deadline) == job_.size) {
    store.set(prefix + "/open", "1", job_.deadline);
  }
  return bootstrap::await_keys(store, {prefix + "/open"}, job_.deadline, [this] {
    if (is_ending_) throw Error(ErrorKind::kUnavailable, "its owner has ended");
  });
}

}  // namespace hbm::communicator::mpi
