// Nothing: nccl.h includes it and uses none of it.
#pragma once
