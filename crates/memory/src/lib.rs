//! RAM blocks, segments and mappings (under construction).
