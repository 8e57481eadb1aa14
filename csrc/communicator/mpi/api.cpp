#include "communicator/mpi/api.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "base/error.h"
#include "communicator/mpi/abi.h"
#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {
namespace {

constexpr int kSuccess = 0;                // in both ABIs
constexpr size_t kLongestVersion = 8192;   // MPI_MAX_LIBRARY_VERSION_STRING, in both ABIs
constexpr size_t kLongestErrorText = 512;  // MPI_MAX_ERROR_STRING

// A function of the library.
template <typename... Arguments>
class Function {
 public:
  Function(const SharedObject& library, const char* its_name)
      : name(its_name),
        call_(reinterpret_cast<int (*)(Arguments...)>(dlsym(library.handle, its_name))) {
    if (call_ == nullptr) {
      throw Error(ErrorKind::kUnavailable,
                  library.path + " has no function " + name + ": it is not an MPI-3.1 library");
    }
  }

  int operator()(Arguments... arguments) const { return call_(arguments...); }

  const char* const name;

 private:
  int (*const call_)(Arguments...);
};

// Returns the library's name and version, without the details of its build.
std::string version_of(const SharedObject& library) {
  const Function<char*, int*> get{library, "MPI_Get_library_version"};
  std::array<char, kLongestVersion> text{};
  int length = 0;
  get(text.data(), &length);
  std::string version(text.data(), static_cast<size_t>(length));
  version.resize(std::min(version.find_first_of(",\n"), version.size()));
  std::replace(version.begin(), version.end(), '\t', ' ');
  return version;
}

template <typename Abi>
class ApiOf final : public Api {
 public:
  explicit ApiOf(const SharedObject& library) : library_(library) {}

  std::string version() const override { return version_of(library_); }
  std::string abi() const override { return Abi::kName; }

  bool initialised() const override { return flag(initialized_); }
  bool finalised() const override { return flag(finalized_); }

  void initialise() const override {
    int provided = 0;
    call(init_thread_, nullptr, nullptr, Abi::kThreadMultiple, &provided);
  }
  bool threads_multiple() const override {
    int provided = 0;
    call(query_thread_, &provided);
    return provided == Abi::kThreadMultiple;
  }
  void finalise() const noexcept override { finalize_(); }

  void return_errors() const override {
    for (const auto comm : {Abi::kCommWorld, Abi::kCommSelf}) {
      call(comm_set_errhandler_, handle(comm), handle(Abi::kErrorsReturn));
    }
  }
  int rank() const override {
    int rank = 0;
    call(comm_rank_, world_, &rank);
    return rank;
  }
  int size() const override {
    int size = 0;
    call(comm_size_, world_, &size);
    return size;
  }
  void broadcast(void* data, size_t bytes) const override {
    call(bcast_, data, static_cast<int>(bytes), byte_, 0, world_);
  }
  Request barrier() const override {
    require_running();
    Handle request{};
    call(ibarrier_, world_, &request);
    return to_request(request);
  }

  CommHandle create(const std::vector<int>& world_ranks, int tag) const override {
    require_running();
    Handle everyone{};
    Handle members{};
    Handle comm{};
    call(comm_group_, world_, &everyone);
    call(group_incl_, everyone, static_cast<int>(world_ranks.size()), world_ranks.data(), &members);
    call(comm_create_group_, world_, members, tag, &comm);
    group_free_(&members);
    group_free_(&everyone);
    call(comm_set_errhandler_, comm, handle(Abi::kErrorsReturn));
    return {value(comm)};
  }
  void free(CommHandle comm) const noexcept override {
    if (finalised()) return;
    Handle freed = handle(comm.value);
    comm_free_(&freed);
  }
  int highest_tag(CommHandle comm) const override {
    constexpr int kPromised = 32767;  // the least upper bound that MPI guarantees
    int* upper = nullptr;
    int found = 0;
    call(comm_get_attr_, handle(comm.value), Abi::kTagUpperBound, &upper, &found);
    return found != 0 ? *upper : kPromised;
  }

  Request isend(const void* data, size_t bytes, int peer, int tag, CommHandle comm) const override {
    require_running();
    Handle request{};
    call(isend_, data, static_cast<int>(bytes), byte_, peer, tag, handle(comm.value), &request);
    return to_request(request);
  }
  Request irecv(void* data, size_t bytes, int peer, int tag, CommHandle comm) const override {
    require_running();
    Handle request{};
    call(irecv_, data, static_cast<int>(bytes), byte_, peer, tag, handle(comm.value), &request);
    return to_request(request);
  }
  Request irecv_any(void* data, size_t bytes, int tag, CommHandle comm, int& peer) const override {
    require_running();
    Handle message{};
    Handle request{};
    Status status{};
    int found = 0;
    call(improbe_, Abi::kAnySource, tag, handle(comm.value), &found, &message, &status);
    if (found == 0) return {};
    call(imrecv_, data, static_cast<int>(bytes), byte_, &message, &request);
    peer = status.source;
    return to_request(request);
  }
  void cancel(Request request) const noexcept override {
    if (finalised()) return;
    Handle cancelled = from_request(request);
    cancel_(&cancelled);
  }

  bool test(Request& request, const char* started_by) const override {
    require_running();
    bool done = false;
    check(run_test(request, done), started_by);
    return done;
  }
  bool test_ended(Request& request) const noexcept override {
    if (finalised()) return true;
    bool done = false;
    return run_test(request, done) != kSuccess || done;
  }
  size_t test_some(std::span<Request> requests, std::span<Completion> completions) const override {
    require_running();
    std::array<Handle, kRequestsPerTest> handles;
    std::array<int, kRequestsPerTest> indices;
    std::array<Status, kRequestsPerTest> statuses;
    std::transform(requests.begin(), requests.end(), handles.begin(), from_request);
    int completed = 0;
    const int code = testsome_(static_cast<int>(requests.size()), handles.data(), &completed,
                               indices.data(), statuses.data());
    if (code != Abi::kErrorInStatus) check(code, testsome_.name);
    if (completed == Abi::kUndefined) return 0;  // all requests were null
    for (size_t i = 0; i < static_cast<size_t>(completed); ++i) {
      requests[static_cast<size_t>(indices[i])] = {};
      completions[i] = {indices[i], code == kSuccess ? kSuccess : statuses[i].error};
    }
    return static_cast<size_t>(completed);
  }

  void check(int code, const char* call) const override {
    if (code == kSuccess) return;
    std::array<char, kLongestErrorText> text{};
    int length = 0;
    error_string_(code, text.data(), &length);
    throw Error(ErrorKind::kNetwork, std::string(call) + " failed: " +
                                         std::string(text.data(), static_cast<size_t>(length)));
  }
  bool truncated(int code) const override {
    int error_class = 0;
    error_class_(code, &error_class);
    return error_class == Abi::kErrorTruncate;
  }

 private:
  using Handle = typename Abi::Handle;
  using Status = typename Abi::Status;

  static Handle handle(std::uintptr_t value) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(value);
    } else {
      return static_cast<Handle>(value);
    }
  }
  static std::uintptr_t value(Handle handle) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<std::uintptr_t>(handle);
    } else {
      return static_cast<unsigned>(handle);
    }
  }
  static Handle from_request(Request request) {
    return handle(request ? request.value : Abi::kRequestNull);
  }
  static Request to_request(Handle request) {
    return value(request) == Abi::kRequestNull ? Request{} : Request{value(request)};
  }

  template <typename... Parameters, typename... Arguments>
  void call(const Function<Parameters...>& function, Arguments... arguments) const {
    check(function(arguments...), function.name);
  }

  void require_running() const {
    if (!finalised()) return;
    throw Error(ErrorKind::kUnavailable,
                "MPI was finalised in this process, and this group communicates over it; call "
                "MPI.Finalize() after the last group is destroyed");
  }

  static bool flag(const Function<int*>& function) {
    int set = 0;
    function(&set);
    return set != 0;
  }

  int run_test(Request& request, bool& done) const noexcept {
    Handle tested = from_request(request);
    int flag = 0;
    const int code = test_(&tested, &flag, reinterpret_cast<Status*>(Abi::kStatusIgnore));
    request = to_request(tested);
    done = flag != 0;
    return code;
  }

  const Handle world_ = handle(Abi::kCommWorld);
  const Handle byte_ = handle(Abi::kByte);

  const SharedObject library_;
  const Function<int*> initialized_{library_, "MPI_Initialized"};
  const Function<int*> finalized_{library_, "MPI_Finalized"};
  const Function<int*, char***, int, int*> init_thread_{library_, "MPI_Init_thread"};
  const Function<int*> query_thread_{library_, "MPI_Query_thread"};
  const Function<> finalize_{library_, "MPI_Finalize"};
  const Function<Handle, Handle> comm_set_errhandler_{library_, "MPI_Comm_set_errhandler"};
  const Function<Handle, int*> comm_rank_{library_, "MPI_Comm_rank"};
  const Function<Handle, int*> comm_size_{library_, "MPI_Comm_size"};
  const Function<void*, int, Handle, int, Handle> bcast_{library_, "MPI_Bcast"};
  const Function<Handle, Handle*> ibarrier_{library_, "MPI_Ibarrier"};
  const Function<Handle, Handle*> comm_group_{library_, "MPI_Comm_group"};
  const Function<Handle, int, const int*, Handle*> group_incl_{library_, "MPI_Group_incl"};
  const Function<Handle*> group_free_{library_, "MPI_Group_free"};
  const Function<Handle, Handle, int, Handle*> comm_create_group_{library_,
                                                                  "MPI_Comm_create_group"};
  const Function<Handle*> comm_free_{library_, "MPI_Comm_free"};
  const Function<Handle, int, void*, int*> comm_get_attr_{library_, "MPI_Comm_get_attr"};
  const Function<const void*, int, Handle, int, int, Handle, Handle*> isend_{library_, "MPI_Isend"};
  const Function<void*, int, Handle, int, int, Handle, Handle*> irecv_{library_, "MPI_Irecv"};
  const Function<int, int, Handle, int*, Handle*, Status*> improbe_{library_, "MPI_Improbe"};
  const Function<void*, int, Handle, Handle*, Handle*> imrecv_{library_, "MPI_Imrecv"};
  const Function<Handle*> cancel_{library_, "MPI_Cancel"};
  const Function<Handle*, int*, Status*> test_{library_, "MPI_Test"};
  const Function<int, Handle*, int*, int*, Status*> testsome_{library_, "MPI_Testsome"};
  const Function<int, char*, int*> error_string_{library_, "MPI_Error_string"};
  const Function<int, int*> error_class_{library_, "MPI_Error_class"};
};

// Returns the version of the standard ABI that the library has; -1 without that ABI.
int standard_abi_version(const SharedObject& library) {
  if (dlsym(library.handle, "MPI_Abi_get_version") == nullptr) return -1;  // before MPI 5
  const Function<int*, int*> get{library, "MPI_Abi_get_version"};
  int major = -1;
  int minor = -1;
  get(&major, &minor);
  return major;
}

}  // namespace

std::unique_ptr<const Api> make_api(const SharedObject& library) {
  constexpr const char* kAdvice =
      "install MPICH (pip install mpich, or apt install libmpich12), or name another library in "
      "HBMCOMM_MPI_LIB";
  const int standard = standard_abi_version(library);
  if (standard == StandardAbi::kVersion) return std::make_unique<ApiOf<StandardAbi>>(library);
  const std::string found = library.path + " is " + version_of(library);
  if (standard >= 0) {
    throw Error(ErrorKind::kUnavailable, found + ", with version " + std::to_string(standard) +
                                             " of MPI's standard ABI; this hbm knows version " +
                                             std::to_string(StandardAbi::kVersion) + ": " +
                                             kAdvice);
  }
  if (dlsym(library.handle, "ompi_mpi_comm_world") != nullptr) {
    throw Error(ErrorKind::kUnavailable,
                found +
                    ", with an ABI of Open MPI's own; hbm needs MPICH's or the standard one of MPI "
                    "5, which Open MPI has from version 6 on, in a libmpi_abi.so.1: " +
                    kAdvice);
  }
  return std::make_unique<ApiOf<MpichAbi>>(library);
}

}  // namespace hbm::communicator::mpi
