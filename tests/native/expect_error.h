// Checks of errors.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <initializer_list>
#include <string>

#include "base/error.h"

namespace hbm {

// Returns the message of an error; "no error" if there is none.
inline std::string text_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

// Expects that `action` throws an hbm::Error of `kind`, and that the error's message contains all
// `parts`.
inline void expect_error(ErrorKind kind, std::initializer_list<std::string> parts,
                         const std::function<void()>& action) {
  try {
    action();
    ADD_FAILURE() << "no error; expected one with \"" << *parts.begin() << '"';
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << '"' << part << "\" is not in: " << error.what();
    }
  }
}

inline void expect_error(ErrorKind kind, std::initializer_list<std::string> parts,
                         const std::exception_ptr& error) {
  expect_error(kind, parts, [&error] {
    if (error) std::rethrow_exception(error);
  });
}

}  // namespace hbm
