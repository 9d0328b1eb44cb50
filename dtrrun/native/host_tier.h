// Where the copies of versions live that have left the device (`core/host.h`): in a file, or for a GPU in pinned memory.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "backend.h"

namespace dtrrun {

// Free places: ranges of numbers, of which those that touch are merged.
class Places {
 public:
  // Returns the first place of a range of `nbytes`, out of the smallest range that has as many; nullopt if there is none.
  std::optional<int64_t> take(int64_t nbytes) {
    auto fits = by_size_.lower_bound({nbytes, 0});
    if (fits == by_size_.end()) return std::nullopt;
    auto [size, place] = *fits;
    remove(by_place_.find(place));
    if (size > nbytes) insert(place + nbytes, size - nbytes);
    return place;
  }
  // Returns whether `take` would find one.
  bool has(int64_t nbytes) const { return by_size_.lower_bound({nbytes, 0}) != by_size_.end(); }
  void give(int64_t place, int64_t nbytes) {
    auto next = by_place_.lower_bound(place);
    if (next != by_place_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == place) {
        place = before->first;
        nbytes += before->second;
        remove(before);
      }
    }
    if (next != by_place_.end() && place + nbytes == next->first) {
      nbytes += next->second;
      remove(next);
    }
    insert(place, nbytes);
  }
  void clear() {
    by_place_.clear();
    by_size_.clear();
  }

 private:
  using ByPlace = std::map<int64_t, int64_t>;
  void insert(int64_t place, int64_t nbytes) {
    by_place_.emplace(place, nbytes);
    by_size_.emplace(nbytes, place);
  }
  void remove(ByPlace::iterator range) {
    by_size_.erase({range->second, range->first});
    by_place_.erase(range);
  }

  ByPlace by_place_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
};

// What the tiers of PyTorch's storages have in common.
class StorageTier : public HostTier {
 public:
  using HostTier::HostTier;

 protected:
  int64_t size_of(Storage* storage) const override { return static_cast<int64_t>(as_impl(storage)->nbytes()); }
  // Returns new memory for a storage that has been emptied. It is filled, and then moved there.
  static c10::Storage blank(Storage* emptied, int64_t nbytes) {
    return {c10::Storage::use_byte_size_t(), c10::SymInt(nbytes), c10::GetAllocator(as_impl(emptied)->device_type()),
            /*resizable=*/true};
  }
  void move(Storage* emptied, Storage* filled) override { swap_memory(*as_impl(emptied), *as_impl(filled)); }
  static StorageRef as_ref(const c10::Storage& one) { return StorageRef::copy(as_storage(one.unsafeGetStorageImpl())); }
};

// Copies in a file that has no name, so that nothing remains of it when the process ends, however it ends.
class FileTier final : public StorageTier {
 public:
  // Raises std::system_error if no file can be made in this folder.
  // overlaps: for tests, what could be copied ahead is.
  FileTier(const std::string& folder, int64_t most_bytes, double ns_out, double ns_in, bool modelled, bool overlaps)
      : StorageTier(most_bytes, ns_out, ns_in, modelled, overlaps), folder_(folder), pid_(getpid()) {
    begin_file();
  }
  ~FileTier() override {
    for (const File& one : files_) close(one.descriptor);
  }

  // A child has been forked, which goes on reading the copies that there are now. Later ones go to another file.
  void forked() { forks_ = true; }

 protected:
  std::optional<int64_t> write(Storage* storage, int64_t size, std::shared_ptr<void>*) override {
    if (getpid() != pid_) return std::nullopt;  // the file is the parent's
    if (std::exchange(forks_, false)) {
      try {
        begin_file();
      } catch (const std::system_error&) {
        forks_ = true;
        return std::nullopt;
      }
    }
    int64_t wanted = rounded(size, -PAGE), room = most_bytes + (most_bytes >> GAPS_SHIFT);
    std::optional<int64_t> place = free_.take(wanted);
    if (!place) {
      if (end_ + wanted - files_.back().first > room) return std::nullopt;
      place = std::exchange(end_, end_ + wanted);
    }
    if (transfer<true>(*place, static_cast<char*>(as_impl(storage)->mutable_data()), size)) {
      files_.back().copies++;
      return place;
    }
    if (*place + wanted == end_)
      end_ = *place;  // the disk is full, or the file may not grow
    else
      free_.give(*place, wanted);
    return std::nullopt;
  }
  StorageRef read(int64_t place, int64_t size, Storage* emptied, std::shared_ptr<void>*) override {
    c10::Storage memory = blank(emptied, size);
    if (!transfer<false>(place, static_cast<char*>(memory.mutable_data()), size))
      throw std::system_error(errno, std::generic_category(), "dtrrun: cannot read from the file of --host-budget in " + folder_);
    return as_ref(memory);
  }
  void release(int64_t place, int64_t size) override {
    auto file = file_of(place);
    file->copies--;
    if (file != std::prev(files_.end())) {  // a child may read it, which has its own descriptor
      if (file->copies == 0) close_file(file);
    } else if (file->copies == 0 && getpid() == pid_ && !forks_ && ftruncate(file->descriptor, 0) == 0) {
      free_.clear();
      end_ = file->first;
    } else {
      free_.give(place, rounded(size, -PAGE));
    }
  }

 private:
  static constexpr int64_t PAGE = 4096;
  static constexpr int GAPS_SHIFT = 3;  // free places may make the file an eighth longer

  struct File {
    int descriptor;
    int64_t first;       // of its places
    int64_t copies = 0;  // that are in it
  };
  using Files = std::vector<File>;

  Files::iterator file_of(int64_t place) {
    return std::prev(std::find_if(files_.rbegin(), files_.rend(), [&](const File& one) { return one.first <= place; }).base());
  }
  void close_file(Files::iterator file) {
    close(file->descriptor);
    files_.erase(file);
  }
  void begin_file() {
    int descriptor = open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor < 0) {  // not every file system has that
      std::string name = folder_ + "/dtrrun-XXXXXX";
      descriptor = mkostemp(name.data(), O_CLOEXEC);
      if (descriptor < 0) throw std::system_error(errno, std::generic_category(), folder_);
      unlink(name.c_str());
    }
    free_.clear();
    if (!files_.empty() && files_.back().copies == 0) close_file(std::prev(files_.end()));
    files_.push_back({descriptor, end_});
  }

  // Returns false if the system refuses, with the reason in `errno`.
  template <bool out>
  bool transfer(int64_t place, char* memory, int64_t size) {
    auto file = file_of(place);
    std::optional<WithoutGil> released;
    if (size >= LONG) released.emplace();
    for (int64_t done = 0; done < size;) {
      ssize_t count;
      if constexpr (out)
        count = pwrite(file->descriptor, memory + done, static_cast<size_t>(size - done), place - file->first + done);
      else
        count = pread(file->descriptor, memory + done, static_cast<size_t>(size - done), place - file->first + done);
      if (count < 0 && errno == EINTR) continue;
      if (count == 0) errno = EIO;
      if (count <= 0) return false;
      done += count;
    }
    return true;
  }
  static constexpr int64_t LONG = 1 << 18;  // bytes from which the GIL is given up

  const std::string folder_;
  const pid_t pid_;
  Files files_;              // the last one is written to
  int64_t end_ = 0;          // the first place after the last file's
  bool forks_ = false;
  Places free_;
};

// Copies in pinned memory, by two streams of our own, one for each direction. Each waits for what the program's main stream was given
// before, and the main stream waits for the copy: at once, or if it is made ahead, before its memory is used or freed. All blocks are
// the main stream's. So whatever gets a block next runs later, and nothing polls: bytes are used, or they are free.
class PinnedTier final : public StorageTier {
 public:
  PinnedTier(const SessionBackend& backend, int64_t most_bytes, double ns_out, double ns_in, bool modelled)
      : StorageTier(most_bytes, ns_out, ns_in, modelled, /*overlaps=*/true), backend_(backend) {}

 protected:
  std::optional<int64_t> write(Storage* storage, int64_t size, std::shared_ptr<void>* event) override {
    if (!is_bound()) return std::nullopt;
    int64_t wanted = rounded(size, -ALIGNMENT);
    std::optional<int64_t> place = free_.take(wanted);
    if (!place && grow(wanted)) place = free_.take(wanted);
    if (!place) return std::nullopt;
    copy(*place, size, c10::Storage(ImplRef::reclaim_copy(as_impl(storage))), /*out=*/true, event);
    copies_++;
    return place;
  }
  StorageRef read(int64_t place, int64_t size, Storage* emptied, std::shared_ptr<void>* event) override {
    std::optional<c10::Storage> memory;
    {
      OnStream now(home());
      if (event == nullptr) {
        Shortage::Kernel::run(/*locked=*/true, /*own=*/true, [&] { memory = blank(emptied, size); });
      } else {
        Shortage::Ignored ignored;  // nothing is evicted for what is not needed yet
        try {
          memory = blank(emptied, size);
        } catch (const c10::OutOfMemoryError&) {
          return {};
        }
      }
    }
    copy(place, size, *memory, /*out=*/false, event);
    return as_ref(*memory);
  }
  void await(void* event) override { await(*static_cast<c10::Event*>(event)); }
  void release(int64_t place, int64_t size) override {
    if (--copies_ != 0) return free_.give(place, rounded(size, -ALIGNMENT));
    free_.clear();
    chunks_.clear();  // PyTorch keeps them for others, once the last copy from there is over
    pinned_ = 0;
  }
  bool is_timed(const Traffic& way) const override { return way.nbytes < MEASURED; }
  void begin_timing(int64_t wanted) override {
    if (!is_bound()) return;
    if (wanted != 0 && !free_.has(rounded(wanted, -ALIGNMENT))) grow(rounded(wanted, -ALIGNMENT));  // pinning takes long
    home().synchronize();
  }

 private:
  static constexpr int64_t CHUNK = int64_t{256} << 20, ALIGNMENT = 512;
  static constexpr int64_t MEASURED = 64 << 20;  // bytes in each direction, for which the host waits

  // While it lives, this thread's operators run on a stream, unseen.
  class OnStream {
   public:
    explicit OnStream(const c10::Stream& stream) : stream_(stream) {}
    OnStream(const OnStream&) = delete;

   private:
    Off off_;
    c10::impl::ExcludeDispatchKeyGuard beneath_the_program_{WayIn::ABOVE};
    c10::InferenceMode no_inference_{false};
    c10::StreamGuard stream_;
  };

  struct Chunk {
    at::Tensor memory;
    int64_t first;  // of its places
  };

  // Pins one more chunk, in which so many bytes fit. Returns false if that is more than is allowed, or the system refuses.
  bool grow(int64_t wanted) {
    // PyTorch pins powers of two.
    auto left = static_cast<uint64_t>(most_bytes - pinned_), size = std::bit_ceil(static_cast<uint64_t>(std::max(CHUNK, wanted)));
    size = std::min(size, std::bit_floor(left));
    if (size < static_cast<uint64_t>(wanted)) return false;
    try {
      Off off;
      c10::impl::ExcludeDispatchKeyGuard beneath_the_program(WayIn::ABOVE);
      at::Tensor memory = at::empty({static_cast<int64_t>(size)}, at::TensorOptions(at::kByte).pinned_memory(true));
      chunks_.push_back({std::move(memory), next_});
    } catch (const c10::Error&) {
      return false;
    }
    free_.give(next_, static_cast<int64_t>(size));
    next_ += static_cast<int64_t>(size) + ALIGNMENT;  // chunks never merge
    pinned_ += static_cast<int64_t>(size);
    return true;
  }
  // event: where the program does not wait yet.
  void copy(int64_t place, int64_t size, const c10::Storage& storage, bool out, std::shared_ptr<void>* event) {
    auto chunk = std::find_if(chunks_.rbegin(), chunks_.rend(), [&](const Chunk& one) { return one.first <= place; });
    const c10::Stream& stream = stream_for(out);
    c10::Event ready(stream.device_type());
    ready.record(home());
    ready.block(stream);
    {
      OnStream now(stream);
      at::Tensor there = chunk->memory.narrow(0, place - chunk->first, size), here = Geometry(size).over(storage);
      if (out)
        there.copy_(here, /*non_blocking=*/true);
      else
        here.copy_(there, /*non_blocking=*/true);
    }
    if (event == nullptr && is_timed(out ? this->out() : in())) stream.synchronize();
    auto done = std::make_shared<c10::Event>(stream.device_type());
    done->record(stream);
    if (event == nullptr)
      await(*done);
    else
      *event = std::move(done);
  }
  // The main stream waits for an event; so does the stream that this thread is on at this moment.
  void await(c10::Event& event) const {
    event.block(home());
    c10::Stream current = c10::impl::VirtualGuardImpl(home().device_type()).getStream(home().device());
    if (current != home()) event.block(current);
  }
  const c10::Stream& stream_for(bool out) {
    std::optional<c10::Stream>& stream = out ? out_stream_ : in_stream_;
    // Of high priority: programs take theirs from another pool.
    if (!stream) stream = c10::impl::VirtualGuardImpl(home().device_type()).getNewStream(home().device(), /*priority=*/-1);
    return *stream;
  }
  bool is_bound() {
    if (!home_ && backend_.device() != nullptr && backend_.device()->is_bound()) home_ = backend_.device()->main_stream();
    return home_.has_value();
  }
  const c10::Stream& home() const { return *home_; }

  const SessionBackend& backend_;
  std::vector<Chunk> chunks_;
  std::optional<c10::Stream> home_, out_stream_, in_stream_;  // home: the program's main stream
  int64_t next_ = 0, pinned_ = 0, copies_ = 0;
  Places free_;
};

}  // namespace dtrrun
