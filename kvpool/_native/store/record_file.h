// Where a record lies below the root: blocks/{bucket}/{tenant}.{namespace}.{hash}.{group}.{rank}
//
// The bucket is the last three digits of the hash, so every bucket is a fair sample of the store.
#pragma once

#include <string>
#include <string_view>

#include "key/record.h"

namespace kvpool {

unsigned bucket_of(const Key& key);
std::string bucket_path(const std::string& root, unsigned bucket);
std::string record_path(const std::string& root, const Key& key);
// Whether a record of this bucket may have this name.
bool is_record_name(unsigned bucket, std::string_view name);

}  // namespace kvpool
