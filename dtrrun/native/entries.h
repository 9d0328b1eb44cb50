// Calls what a session has replaced in PyTorch such that none of our frames lies between the program and the original.
//
// A replacement (`runtime/patches/registry.py`) is Python code that runs something before or after the original. The original
// would find its frame where the program's should be: a warning names the line so many frames up (`stacklevel`), and so do
// warnings of C functions, and functions look at their callers. So a replacement is called through an `Entry`, which notes the
// program's frame, and calls the original through an `Original`, in which that frame is the thread's newest one.
//
// Relies on where Python keeps a thread's newest frame, and a frame the one before it. Newer versions of Python than those
// known here see our frames.
#pragma once

#include <algorithm>
#include <vector>

#include "python.h"

namespace dtrrun {

// The frames of a thread.
class Frames {
 public:
  using Frame = _PyInterpreterFrame;

  // Returns the newest one, or null.
  static Frame* newest() { return KNOWN ? *place() : nullptr; }
  // Returns the one that has called it.
  static Frame* before(Frame* frame) {
    struct Layout {
      void* first[PY_VERSION_HEX >= 0x030C0000 ? 1 : 6];
      Frame* previous;
    };
    return frame == nullptr ? nullptr : reinterpret_cast<Layout*>(frame)->previous;
  }

  // Where a frame is: its code, and the offset of the present instruction. code: borrowed; null for a frame without any.
  struct Place {
    PyCodeObject* code;
    int offset;
  };
  static Place place_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject* code = PyUnstable_InterpreterFrame_GetCode(frame);
    Py_DECREF(code);  // the frame has it
    if (!PyCode_Check(code)) return {nullptr, -1};
    return {reinterpret_cast<PyCodeObject*>(code), PyUnstable_InterpreterFrame_GetLasti(frame)};
#else
    struct Layout {
      void* first[4];
      PyCodeObject* code;
      void *object, *previous;
      const char* instruction;
    };
    auto* its = reinterpret_cast<Layout*>(frame);
    return {its->code, static_cast<int>(its->instruction - reinterpret_cast<const char*>(its->code->co_code_adaptive))};
#endif
  }

  // Makes a frame that is under way the newest one, while in scope.
  class Newest {
   public:
    explicit Newest(Frame* frame) : own_(frame == nullptr ? nullptr : std::exchange(*place(), frame)) {}
    ~Newest() {
      if (own_ != nullptr) *place() = own_;
    }
    Newest(const Newest&) = delete;

   private:
    Frame* own_;
  };

 private:
  static constexpr bool KNOWN = PY_VERSION_HEX < 0x030F0000;
  static Frame** place() {
#if PY_VERSION_HEX >= 0x030D0000
    return &PyThreadState_Get()->current_frame;
#else
    return &PyThreadState_Get()->cframe->current_frame;
#endif
  }
};

// A Python object that calls another, and otherwise shows that one's attributes.
struct Passage {
  PyObject_HEAD
  PyObject *dict, *target, *hide;  // hide: called with the errors that leave an entry, or null
  Passage* entry;                  // of an `Original`: where its calls come in
  bool skips;                      // the entry is called by a frame of ours
  vectorcallfunc vectorcall;
};

class Entries {
 public:
  static inline PyTypeObject *entry_type = nullptr, *original_type = nullptr;

  // entry(make, original, hide, skips): returns what to call in place of `original`.
  static PyObject* make(PyObject*, PyObject* args) {
    PyObject *make, *original, *hide;
    int skips;
    if (!PyArg_ParseTuple(args, "OOOp", &make, &original, &hide, &skips)) return nullptr;
    return guarded([&]() -> PyObject* {
      Ref in = made(entry_type, &enter), out = made(original_type, &leave);
      as_passage(out.get())->target = Ref::copy(original).release();
      as_passage(out.get())->entry = as_passage(in.get());
      as_passage(in.get())->skips = skips != 0;
      as_passage(in.get())->hide = hide == Py_None ? nullptr : Ref::copy(hide).release();
      as_passage(in.get())->target = checked(PyObject_CallOneArg(make, out.get())).release();
      return in.release();
    });
  }

  static bool add_types() {
    static PyMemberDef members[] = {{"__dictoffset__", T_PYSSIZET, offsetof(Passage, dict), READONLY, nullptr},
                                    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Passage, vectorcall), READONLY, nullptr},
                                    {nullptr, 0, 0, 0, nullptr}};
    static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)},
                                  {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                  {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                  {Py_tp_getattro, reinterpret_cast<void*>(&get)},
                                  {Py_tp_members, members},
                                  {0, nullptr}};
    constexpr unsigned FLAGS =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    static PyType_Spec entry = {"_dtrrun_native.Entry", sizeof(Passage), 0, FLAGS, slots};
    static PyType_Spec original = {"_dtrrun_native.Original", sizeof(Passage), 0, FLAGS, slots};
    entry_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&entry));
    original_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&original));
    return entry_type != nullptr && original_type != nullptr;
  }

 private:
  // A call that has come in through an entry, and the frame that has made it.
  struct Call {
    const Passage* entry;
    Frames::Frame* program;
    int64_t number;
  };
  static inline thread_local std::vector<Call> calls_;
  static inline thread_local int64_t count_ = 0;

  static Passage* as_passage(PyObject* object) { return reinterpret_cast<Passage*>(object); }
  static Ref made(PyTypeObject* type, vectorcallfunc call) {
    Ref object = checked(type->tp_alloc(type, 0));
    as_passage(object.get())->vectorcall = call;
    return object;
  }

  static PyObject* enter(PyObject* self, PyObject* const* given, size_t count, PyObject* names) {
    Passage* entry = as_passage(self);
    Frames::Frame* program = Frames::newest();
    if (entry->skips) program = Frames::before(program);
    int64_t number = ++count_;
    calls_.push_back({entry, program, number});
    Ref kept = Ref::copy(self), target = Ref::copy(entry->target);
    PyObject* result = PyObject_Vectorcall(target.get(), given, static_cast<size_t>(PyVectorcall_NARGS(count)), names);
    // Usually the last one; but a greenlet may have come in since.
    auto own = std::find_if(calls_.rbegin(), calls_.rend(), [&](const Call& one) { return one.number == number; });
    if (own != calls_.rend()) calls_.erase(std::next(own).base());
    if (result == nullptr && entry->hide != nullptr) hide(entry->hide);
    return result;
  }
  static PyObject* leave(PyObject* self, PyObject* const* given, size_t count, PyObject* names) {
    Passage* original = as_passage(self);
    auto call = std::find_if(calls_.rbegin(), calls_.rend(), [&](const Call& one) { return one.entry == original->entry; });
    Frames::Newest newest(call == calls_.rend() ? nullptr : call->program);
    return PyObject_Vectorcall(original->target, given, static_cast<size_t>(PyVectorcall_NARGS(count)), names);
  }
  static void hide(PyObject* function) {
    PyObject *type, *error, *frames;
    PyErr_Fetch(&type, &error, &frames);
    PyErr_NormalizeException(&type, &error, &frames);
    if (frames != nullptr) PyException_SetTraceback(error, frames);
    Py_XDECREF(frames);
    if (!Ref(PyObject_CallOneArg(function, error))) PyErr_WriteUnraisable(function);
    PyErr_Restore(type, error, PyException_GetTraceback(error));
  }

  static PyObject* get(PyObject* self, PyObject* name) {
    PyObject* found = PyObject_GenericGetAttr(self, name);
    if (found != nullptr || Py_TYPE(self) != original_type || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
    PyErr_Clear();
    return PyObject_GetAttr(as_passage(self)->target, name);
  }
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Passage* one = as_passage(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(one->dict);
    Py_VISIT(one->target);
    Py_VISIT(one->hide);
    return 0;
  }
  static int clear(PyObject* self) {
    Passage* one = as_passage(self);
    Py_CLEAR(one->dict);
    Py_CLEAR(one->hide);
    return 0;  // not the target: a call of the program may still come
  }
  static void deallocate(PyObject* self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_CLEAR(as_passage(self)->target);
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
  }
};

}  // namespace dtrrun
