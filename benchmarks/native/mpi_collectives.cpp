// One rank of MPI's own collectives, called by a program without Python: "mpi_collectives DIRECTORY
// RANK SIZE LIBRARIES". It is the series C of Woo et al. 2020: MPI on plain memory, in place where
// MPI can. Ranks meet by files in the directory; MPI's library is looked for in LIBRARIES.
//
//   ready                          answers once all have met
//   prepare COLLECTIVE BYTES TYPE  memory for it, and a first call whose outcome is checked
//   run SAMPLES CALLS              all ranks are told the same
//
// Collectives: "allreduce", "broadcast", and "gather", of which BYTES are what the root, rank 0,
// receives. Types: "float32", "float64".
#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "communicator/mpi/abi.h"
#include "communicator/mpi/library.h"
#include "meeting.h"
#include "program.h"

namespace hbm::bench {
namespace {

// Finds a function in the MPI library that is loaded already: mpi::library() has only those that
// hbm calls.
template <class Function>
Function* function_of_mpi(const char* name) {
  void* const library = dlopen(mpi::library().path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  void* const found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) throw Error(ErrorKind::kUnavailable, dlerror());
  return reinterpret_cast<Function*>(found);
}

class MpiRank {
 public:
  explicit MpiRank(RankPlace place) : place_(std::move(place)) {}

  void ready() { connection_ = connect_by_mpi(place_); }

  void prepare(const std::string& collective, size_t bytes, const std::string& type) {
    if (type == "float32") return prepare<float>(collective, bytes, MPI_FLOAT);
    if (type == "float64") return prepare<double>(collective, bytes, MPI_DOUBLE);
    throw Error(ErrorKind::kInvalid, "MPI is measured in float32 and float64, not " + type);
  }

  Numbers run(size_t samples, size_t calls) { return timed(call_, samples, calls); }

 private:
  using Call = std::function<void()>;

  // Each rank's elements are its rank + 1; afterwards they are zeros.
  template <class Element>
  void prepare(const std::string& collective, size_t bytes, MPI_Datatype type) {
    const size_t count = bytes / sizeof(Element);
    const size_t share = count / static_cast<size_t>(place_.size);
    const size_t own = collective == "gather" && place_.rank != 0 ? share : count;
    pages_ = std::make_unique<Pages>(own * sizeof(Element));
    const std::span data{reinterpret_cast<Element*>(pages_->bytes().data()), own};
    std::ranges::fill(data, static_cast<Element>(place_.rank + 1));
    call_ = call_of(collective, data.data(), static_cast<int>(count), type);
    call_();
    for (size_t i = 0; i < own; ++i) {
      if (data[i] != static_cast<Element>(expected(collective, i / share))) {
        throw Error(ErrorKind::kMismatch,
                    "element " + std::to_string(i) + " of the " + collective + " is wrong");
      }
    }
    std::ranges::fill(data, Element{0});
  }

  Call call_of(const std::string& collective, void* data, int count, MPI_Datatype type) const {
    const auto check = [](const char* name, int code) { mpi::library().api->check(code, name); };
    if (collective == "allreduce") {
      const auto allreduce = function_of_mpi<decltype(::MPI_Allreduce)>("MPI_Allreduce");
      return [=] {
        check("MPI_Allreduce", allreduce(MPI_IN_PLACE, data, count, type, MPI_SUM, MPI_COMM_WORLD));
      };
    }
    if (collective == "broadcast") {
      const auto broadcast = function_of_mpi<decltype(::MPI_Bcast)>("MPI_Bcast");
      return [=] { check("MPI_Bcast", broadcast(data, count, type, 0, MPI_COMM_WORLD)); };
    }
    if (collective == "gather") {
      const auto gather = function_of_mpi<decltype(::MPI_Gather)>("MPI_Gather");
      const int share = count / place_.size;
      void* const sent = place_.rank == 0 ? MPI_IN_PLACE : data;
      return [=] {
        check("MPI_Gather", gather(sent, share, type, data, share, type, 0, MPI_COMM_WORLD));
      };
    }
    throw Error(ErrorKind::kInvalid, "no collective \"" + collective + "\"");
  }

  // Returns what elements are after the call. `sender`: whose part of a gather they lie in.
  int expected(const std::string& collective, size_t sender) const {
    if (collective == "allreduce") return place_.size * (place_.size + 1) / 2;
    if (collective == "broadcast") return 1;
    return (place_.rank == 0 ? static_cast<int>(sender) : place_.rank) + 1;
  }

  const RankPlace place_;
  mpi::MpiConnection connection_;  // keeps the world
  std::unique_ptr<Pages> pages_;
  Call call_;
};

}  // namespace
}  // namespace hbm::bench

int main(int argc, char** argv) {
  using namespace hbm::bench;
  if (argc != 5) return 2;
  hbm::mpi::set_search_path({argv[4]});
  MpiRank rank({argv[1], std::stoi(argv[2]), std::stoi(argv[3])});
  return serve(
      {{"ready",
        [&](const Words&) {
          rank.ready();
          return Numbers();
        }},
       {"prepare",
        [&](const Words& words) {
          rank.prepare(words.at(0), number(words, 1), words.at(2));
          return Numbers();
        }},
       {"run", [&](const Words& words) { return rank.run(number(words, 0), number(words, 1)); }}});
}
