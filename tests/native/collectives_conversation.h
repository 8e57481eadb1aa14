// A random conversation of a group over any transport. It has every collective, send and receive,
// of random sizes, types and operators, from random memory, at random times. It compares the
// results with plain loops over data that every rank can compute.
//
// All ranks draw the operations from a generator with the same seed, so all issue the same ones.
// Each rank draws times and memory from a generator of its own. Operations may overlap; finish()
// waits for all of them, and compares their results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives_data.h"
#include "communicator/communicator.h"
#include "kernels/reduce.h"
#include "progress/operation_queue.h"
#include "seeds.h"

namespace hbm::communicator {

// A rank of the conversation, with its communicator and its two queues.
struct Speaker {
  int rank;
  int size;
  std::shared_ptr<Communicator> collectives;
  std::shared_ptr<progress::OperationQueue> ordered;
  std::shared_ptr<progress::OperationQueue> transfers;
  uint64_t* sequence;
  std::vector<size_t> sizes;     // sizes of messages to try, in bytes
  size_t most_bytes;             // the most that one rank receives in one operation
  std::vector<Allocate> memory;  // the kinds of memory for tensors
  // Returns the expected result of a reduction of all ranks' inputs.
  std::function<Bytes(const std::vector<Bytes>&, size_t count, Dtype, ReduceOp)> reduced = in_order;
};

class Conversation {
 public:
  Conversation(Speaker speaker, uint64_t seed)
      : speaker_(std::move(speaker)),
        shared_(seed),
        own_(seed + 1000 + static_cast<uint64_t>(speaker_.rank)) {}

  void say_each_once() {
    for (const Topic topic : kTopics) say(topic);
  }

  void say(size_t operations) {
    for (size_t i = 0; i < operations; ++i) say(kTopics[shared_() % kTopics.size()]);
  }

  void finish() {
    for (const Check& check : checks_) {
      check.queue->wait(check.request, progress::Clock::now() + 2 * kTimeout);
      ASSERT_TRUE(check.request->done()) << check.what;
      if (check.request->error()) std::rethrow_exception(check.request->error());
      ASSERT_TRUE(check.right()) << check.what << " on rank " << speaker_.rank << " of "
                                 << speaker_.size;
    }
    checks_.clear();
  }

  // Ends the conversation for this rank. A barrier keeps each rank until all ranks have finished
  // their operations, because a rank moves other ranks' data only while it drives operations.
  void part() {
    finish();
    barrier();
    finish();
  }

 private:
  using Topic = void (Conversation::*)();
  using TensorPtr = std::shared_ptr<Tensor>;

  struct Check {
    std::shared_ptr<progress::OperationQueue> queue;
    std::shared_ptr<progress::Request> request;
    std::string what;
    std::function<bool()> right;
  };

  void say(Topic topic) {
    dtype_ = kSpokenDtypes[shared_() % kSpokenDtypes.size()];
    op_ = kSpokenOps[shared_() % kSpokenOps.size()];
    while (kernels::reduce_unsupported(dtype_, op_) != nullptr) {
      op_ = kSpokenOps[shared_() % kSpokenOps.size()];
    }
    root_ = static_cast<int>(shared_() % ranks());
    seed_ = shared_();
    one_kind_ = shared_() % 2 == 0 ? &kind(shared_()) : nullptr;
    (this->*topic)();
    if (shared_() % 4 == 0) finish();
  }

  size_t ranks() const { return static_cast<size_t>(speaker_.size); }
  size_t self() const { return static_cast<size_t>(speaker_.rank); }
  bool is_root() const { return speaker_.rank == root_; }
  bool in_place() { return own_() % 2 == 0; }
  const Allocate& kind(size_t index) const {
    return speaker_.memory[index % speaker_.memory.size()];
  }

  // Returns a random number of elements for a message, so that `messages` such messages together
  // have at most most_bytes.
  size_t count(size_t messages = 1) {
    const size_t most = speaker_.most_bytes / messages;
    size_t bytes = speaker_.sizes[shared_() % speaker_.sizes.size()];
    while (bytes > most) bytes = speaker_.sizes[shared_() % speaker_.sizes.size()];
    const size_t element = element_size(dtype_);
    const size_t counts[] = {bytes, (bytes + element - 1) / element, bytes / element + 1};
    const size_t chosen = counts[shared_() % 3];
    return std::min(chosen, most / element);
  }
  std::vector<size_t> counts() {
    std::vector<size_t> each(ranks());
    for (size_t& one : each) one = count(ranks());
    if (shared_() % 3 == 0) std::fill(each.begin(), each.end(), each[0]);
    return each;
  }

  TensorPtr blank(size_t count) {
    const Allocate& allocate = one_kind_ != nullptr ? *one_kind_ : kind(own_());
    return std::make_shared<Tensor>(allocate, count, dtype_, own_() % 3 == 0 ? own_() % 16 : 0);
  }
  TensorPtr filled(const Bytes& content) {
    TensorPtr made = blank(content.size() / element_size(dtype_));
    made->set(content);
    return made;
  }
  std::vector<TensorPtr> blanks(const std::vector<size_t>& counts) {
    std::vector<TensorPtr> made;
    for (const size_t count : counts) made.push_back(blank(count));
    return made;
  }

  // Returns the elements that rank `from` has for rank `to` in the current operation.
  Bytes words(size_t from, size_t to, size_t count) const {
    return pattern(seed_ + from * 1009 + to * 1'000'003, count, dtype_);
  }
  std::vector<TensorPtr> own_words(const std::vector<size_t>& counts) {
    std::vector<TensorPtr> made;
    for (size_t to = 0; to < counts.size(); ++to) {
      made.push_back(filled(words(self(), to, counts[to])));
    }
    return made;
  }

  // Returns a function that computes the reduction of all ranks' inputs for rank `to`.
  std::function<Bytes()> reduction(size_t to, size_t count) const {
    return [seed = seed_, size = ranks(), to, count, dtype = dtype_, op = op_,
            reduced = speaker_.reduced] {
      std::vector<Bytes> inputs;
      for (size_t from = 0; from < size; ++from) {
        inputs.push_back(pattern(seed + from * 1009 + to * 1'000'003, count, dtype));
      }
      return reduced(inputs, count, dtype, op);
    };
  }

  static std::vector<Source> sources(const std::vector<TensorPtr>& tensors) {
    std::vector<Source> views;
    for (const auto& tensor : tensors) views.push_back(tensor->source());
    return views;
  }
  static std::vector<Sink> sinks(const std::vector<TensorPtr>& tensors) {
    std::vector<Sink> views;
    for (const auto& tensor : tensors) views.push_back(tensor->sink());
    return views;
  }

  void submit(const std::shared_ptr<progress::OperationQueue>& queue, OperationPtr operation,
              progress::Mode mode, std::function<bool()> right) {
    if (own_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_() % 500));
    std::string what = operation->describe();
    auto request = queue->enqueue(std::move(operation), kTimeout, {});
    queue->launch(request, mode);
    if (own_() % 8 == 0) queue->test(request);
    checks_.push_back({queue, std::move(request), std::move(what), std::move(right)});
  }
  void collective(OperationPtr operation, std::function<bool()> right) {
    submit(speaker_.ordered, std::move(operation),
           own_() % 2 == 0 ? progress::Mode::kSync : progress::Mode::kAsync, std::move(right));
  }
  uint64_t next() { return ++*speaker_.sequence; }

  void allreduce() {
    const size_t n = count();
    const TensorPtr in = filled(words(self(), 0, n));
    const TensorPtr out = in_place() ? in : blank(n);
    collective(speaker_.collectives->allreduce(next(), in->data(), out->data(), n, dtype_, op_),
               [in, out, expected = reduction(0, n)] { return out->holds(expected()); });
  }

  void reduce() {
    const size_t n = count();
    const Bytes input = words(self(), 0, n);
    const TensorPtr in = filled(input);
    const TensorPtr out = in_place() ? in : blank(n);
    const bool root = is_root();
    collective(speaker_.collectives->reduce(next(), in->data(), out->data(), n, dtype_, op_, root_),
               [=, expected = reduction(0, n)] {
                 if (root) return out->holds(expected());
                 return in->holds(input) && (out == in || out->untouched());
               });
  }

  void reduce_scatter() {
    const std::vector<size_t> each = counts();
    const auto inputs = own_words(each);
    const TensorPtr out = in_place() ? inputs[self()] : blank(each[self()]);
    collective(
        speaker_.collectives->reduce_scatter(next(), sources(inputs), out->data(), dtype_, op_),
        [inputs, out, expected = reduction(self(), each[self()])] {
          return out->holds(expected());
        });
  }

  void broadcast() {
    const size_t n = count();
    const Bytes expected = words(static_cast<size_t>(root_), 0, n);
    const TensorPtr data = is_root() ? filled(expected) : blank(n);
    collective(speaker_.collectives->broadcast(next(), data->data(), n, dtype_, root_),
               [data, expected] { return data->holds(expected); });
  }

  // Returns true if each of `outputs` holds the expected bytes of its rank.
  static bool all_hold(const std::vector<TensorPtr>& outputs, const std::vector<Bytes>& expected) {
    return std::equal(outputs.begin(), outputs.end(), expected.begin(), expected.end(),
                      [](const auto& tensor, const auto& bytes) { return tensor->holds(bytes); });
  }
  std::vector<Bytes> words_to_all(const std::vector<size_t>& each) const {
    std::vector<Bytes> all;
    for (size_t from = 0; from < ranks(); ++from) all.push_back(words(from, 0, each[from]));
    return all;
  }

  void allgather() {
    const std::vector<size_t> each = counts();
    const std::vector<Bytes> expected = words_to_all(each);
    const auto outputs = blanks(each);
    const TensorPtr in = in_place() ? outputs[self()] : blank(each[self()]);
    in->set(expected[self()]);
    collective(speaker_.collectives->allgather(next(), in->source(), sinks(outputs), dtype_),
               [in, outputs, expected] { return all_hold(outputs, expected); });
  }

  void gather() {
    const std::vector<size_t> each = counts();
    const std::vector<Bytes> all = words_to_all(each);
    const auto outputs = is_root() ? blanks(each) : std::vector<TensorPtr>{};
    const TensorPtr in = is_root() && in_place() ? outputs[self()] : blank(each[self()]);
    in->set(all[self()]);
    collective(speaker_.collectives->gather(next(), in->source(), sinks(outputs), dtype_, root_),
               [in, outputs, all] { return outputs.empty() || all_hold(outputs, all); });
  }

  void scatter() {
    const std::vector<size_t> each = counts();
    const auto inputs = is_root() ? own_words(each) : std::vector<TensorPtr>{};
    const TensorPtr out = is_root() && in_place() ? inputs[self()] : blank(each[self()]);
    const Bytes expected = words(static_cast<size_t>(root_), self(), each[self()]);
    collective(speaker_.collectives->scatter(next(), sources(inputs), out->sink(), dtype_, root_),
               [inputs, out, expected] { return out->holds(expected); });
  }

  void alltoall() {
    const bool same = shared_() % 2 == 0;
    std::vector<std::vector<size_t>> table(1, counts());
    while (table.size() < ranks()) table.push_back(same ? table[0] : counts());
    std::vector<size_t> incoming;
    std::vector<Bytes> expected;
    for (size_t from = 0; from < ranks(); ++from) {
      incoming.push_back(table[from][self()]);
      expected.push_back(words(from, self(), incoming.back()));
    }
    const auto inputs = own_words(table[self()]);
    const auto outputs = blanks(incoming);
    collective(speaker_.collectives->alltoall(next(), sources(inputs), sinks(outputs), dtype_),
               [inputs, outputs, expected] { return all_hold(outputs, expected); });
  }

  void barrier() {
    collective(speaker_.collectives->barrier(next()), [] { return true; });
  }

  void send(const Bytes& content, size_t to, int tag) {
    const TensorPtr in = filled(content);
    submit(speaker_.transfers,
           speaker_.collectives->send(in->source(), dtype_, static_cast<int>(to), tag),
           progress::Mode::kAsync, [in, content] { return in->holds(content); });
  }
  void receive(const Bytes& content, size_t from, int tag) {
    const TensorPtr out = blank(content.size() / element_size(dtype_));
    const auto source = std::make_shared<int>(kAnyRank);
    submit(speaker_.transfers,
           speaker_.collectives->receive(out->sink(), dtype_, static_cast<int>(from), tag, source),
           progress::Mode::kAsync, [out, content, source, from] {
             return out->holds(content) && *source == static_cast<int>(from);
           });
  }
  int new_tags() { return first_tag_ = (first_tag_ + kMessages) % (1000 * kMessages); }

  // Each rank sends several messages to the next rank, and issues its receives before or after its
  // sends. In half of the rings each message has its own tag, and the receives are in reverse
  // order.
  void ring() {
    if (speaker_.size == 1) return;
    const int first_tag = new_tags();
    const bool reverse = shared_() % 2 == 0;
    const size_t messages = 1 + shared_() % kMessages;
    const size_t before = (self() + ranks() - 1) % ranks();
    std::vector<size_t> each;
    for (size_t i = 0; i < messages; ++i) each.push_back(count(messages));
    const auto tag = [&](size_t i) { return first_tag + (reverse ? static_cast<int>(i) : 0); };
    const auto send_all = [&] {
      for (size_t i = 0; i < messages; ++i) {
        send(words(self(), i, each[i]), (self() + 1) % ranks(), tag(i));
      }
    };
    const bool send_first = own_() % 2 == 0;
    if (send_first) send_all();
    for (size_t k = 0; k < messages; ++k) {
      const size_t i = reverse ? messages - 1 - k : k;
      receive(words(before, i, each[i]), before, tag(i));
    }
    if (!send_first) send_all();
  }

  // All other ranks send to the root, which receives in the order of arrival.
  void any_source() {
    const int tag = new_tags();
    const size_t n = count(ranks());
    if (!is_root()) return send(words(self(), 0, n), static_cast<size_t>(root_), tag);
    const auto all =
        std::make_shared<std::vector<Bytes>>(words_to_all(std::vector<size_t>(ranks(), n)));
    for (size_t peer = 1; peer < ranks(); ++peer) {
      const TensorPtr out = blank(n);
      const auto source = std::make_shared<int>(kAnyRank);
      submit(speaker_.transfers,
             speaker_.collectives->receive(out->sink(), dtype_, kAnyRank, tag, source),
             progress::Mode::kAsync,
             [all, out, source] { return out->holds(all->at(static_cast<size_t>(*source))); });
    }
  }

  static constexpr std::chrono::milliseconds kTimeout{60'000};
  static constexpr int kMessages = 20;  // most messages of a ring; more than a mailbox has cells
  static constexpr std::array<Topic, 11> kTopics = {
      &Conversation::allreduce, &Conversation::reduce,     &Conversation::reduce_scatter,
      &Conversation::broadcast, &Conversation::allgather,  &Conversation::gather,
      &Conversation::scatter,   &Conversation::alltoall,   &Conversation::barrier,
      &Conversation::ring,      &Conversation::any_source,
  };

  const Speaker speaker_;
  std::mt19937_64 shared_;
  std::mt19937_64 own_;
  std::vector<Check> checks_;
  int first_tag_ = 0;

  // The current operation.
  Dtype dtype_{};
  ReduceOp op_{};
  int root_ = 0;
  uint64_t seed_ = 0;
  const Allocate* one_kind_ = nullptr;  // memory of all tensors; null: each has a random kind
};

}  // namespace hbm::communicator
