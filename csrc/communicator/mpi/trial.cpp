#include "communicator/mpi/trial.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/log.h"
#include "communicator/mpi/abi.h"
#include "communicator/mpi/segments.h"
#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {
namespace {

using std::chrono::steady_clock;

std::mutex program_mutex;
std::vector<std::string> trial_program;

// A program whose output goes to a pipe. The end of the output shows that the program has ended.
// The exit status alone would not be enough, because a handler of SIGCHLD in the user's program may
// collect it first.
class Program {
 public:
  explicit Program(const std::vector<std::string>& command) {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe", errno);
    output_ = Descriptor(ends[0]);
    const Descriptor input(ends[1]);
    fcntl(output_.get(), F_SETFL, O_NONBLOCK);
    std::vector<char*> arguments;
    for (const std::string& argument : command) {
      arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, input.get(), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, input.get(), STDERR_FILENO);
    const int job = std::atoi(std::getenv("PMI_FD"));
    posix_spawn_file_actions_adddup2(&files, job, job);  // the program inherits it
    sigset_t signals;
    sigemptyset(&signals);
    posix_spawnattr_setsigmask(&attributes, &signals);
    sigfillset(&signals);
    posix_spawnattr_setsigdefault(&attributes, &signals);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    const int error =
        posix_spawn(&pid_, arguments[0], &files, &attributes, arguments.data(), environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) fail(command.front(), error);
  }

  ~Program() {
    if (collect(WNOHANG) || pid_ < 0) return;
    stop();
    unlink_segments_of(pid_);
    kill(pid_, SIGKILL);
    collect(0);
  }

  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Waits up to kTrialCheckPeriod for output. Returns false after the program has ended.
  bool listen() {
    pollfd one{output_.get(), POLLIN, 0};
    // The exit status is checked too. The output may not end, because a forked child of the user's
    // program may hold the other end of the pipe open.
    const bool over = collect(WNOHANG);
    if (poll(&one, 1, static_cast<int>(kTrialCheckPeriod.count())) <= 0) return !over;
    std::array<char, 4096> chunk{};
    const ssize_t got = read(output_.get(), chunk.data(), chunk.size());
    if (got > 0) words_.append(chunk.data(), static_cast<size_t>(got));
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
  }

  bool passed() const { return words_.find(kTrialPassed) != std::string::npos; }

  // Describes the program's end. REQUIRES: listen() has returned false.
  std::string end() {
    collect(0);
    if (!status_) return "its exit code is not known";
    if (WIFSIGNALED(*status_)) return strsignal(WTERMSIG(*status_));
    return "exit code " + std::to_string(WEXITSTATUS(*status_));
  }

  // Returns the last lines of the program's output, as one line.
  std::string last_words() const {
    std::string text = words_;
    if (text.size() > kQuotedOutputBytes) {
      text.erase(0, text.find('\n', text.size() - kQuotedOutputBytes) + 1);
    }
    while (!text.empty() && text.back() == '\n') text.pop_back();
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text.empty() ? "" : ". It wrote: " + text;
  }

 private:
  [[noreturn]] static void fail(const std::string& what, int error) {
    throw Error(ErrorKind::kUnavailable, "cannot start a process that tries MPI_Init (" + what +
                                             "): " + std::strerror(error));
  }

  // Collects the exit status. Returns true if this object has the status. Returns false if the
  // program runs, or if other code has collected the status: the process then does not exist any
  // more.
  bool collect(int options) noexcept {
    if (pid_ < 0) return status_.has_value();
    int status = 0;
    pid_t found = 0;
    while ((found = waitpid(pid_, &status, options)) < 0 && errno == EINTR) {
    }
    if (found == 0) return false;
    if (found == pid_) status_ = status;
    pid_ = -1;
    return status_.has_value();
  }

  // Stops the program, so that it creates no more segments. Waits until it has stopped or ended,
  // but at most kTrialStopTimeout: a system call that does not return delays the stop.
  void stop() noexcept {
    kill(pid_, SIGSTOP);
    const auto until = steady_clock::now() + kTrialStopTimeout;
    while (runs() && steady_clock::now() < until) {
      std::this_thread::sleep_for(kTrialStopCheckPeriod);
    }
  }

  // Returns false if the program is stopped (T), has ended (Z), or does not exist any more. Reads
  // /proc, because other code of the user's program may collect the state from waitpid().
  bool runs() const noexcept try {
    std::ifstream file("/proc/" + std::to_string(pid_) + "/stat");
    std::string text;
    std::getline(file, text);
    const size_t name_end = text.rfind(") ");
    return name_end != std::string::npos && std::strchr("TZX", text[name_end + 2]) == nullptr;
  } catch (const std::exception&) {  // no memory
    return false;
  }

  pid_t pid_ = -1;  // -1: not started, or its exit status was collected
  std::optional<int> status_;
  Descriptor output_;
  std::string words_;
};

std::string remedy(const std::string& variables) {
  return "MPI reads these variables, of which one may be wrong for this machine: " + variables +
         ". Unset it or correct it (docs/running.md, \"Networks\")";
}

int thread_multiple(const MpiLibrary& library) {
  return library.api->abi() == StandardAbi::kName ? StandardAbi::kThreadMultiple
                                                  : MpichAbi::kThreadMultiple;
}

}  // namespace

void set_trial_program(std::vector<std::string> program) {
  const std::lock_guard lock(program_mutex);
  trial_program = std::move(program);
}

void try_initialise(const MpiLibrary& library, const std::shared_ptr<bootstrap::KeyValue>& store,
                    const PmiResponder::Job& job, const std::string& variables,
                    const std::function<void()>& check) {
  std::vector<std::string> command;
  {
    const std::lock_guard lock(program_mutex);
    command = trial_program;
  }
  if (command.empty()) return;
  log::info("MPI_Init is tried in a process of its own, because of " + variables);
  command.push_back(library.path);
  command.push_back(std::to_string(thread_multiple(library)));
  const auto until = std::min(job.deadline, steady_clock::now() + kTrialTimeout);
  const std::string key = job.name + "/initialised";
  PmiResponder responder(store, job);
  Program program(command);
  const auto require_time = [&] {
    if (steady_clock::now() < until) return;
    throw Error(ErrorKind::kTimeout,
                "MPI_Init did not return in time in a process that tried it. " + remedy(variables) +
                    program.last_words());
  };
  const auto ended = [&] {
    return Error(ErrorKind::kUnavailable,
                 "MPI_Init would end this process; it ended one that tried it (" + program.end() +
                     "). " + remedy(variables) + program.last_words());
  };
  for (bool announced = false;; require_time()) {
    if (!program.listen()) throw ended();
    if (check) check();
    if (!program.passed()) continue;
    // The processes connect to one another, so each must stay until MPI_Init has returned in all.
    if (!std::exchange(announced, true) && store->add(key, 1, job.deadline) == job.size) {
      store->set(key + "/all", "1", job.deadline);
    }
    if (store->has({key + "/all"}, job.deadline)) return;
  }
}

}  // namespace hbm::communicator::mpi
