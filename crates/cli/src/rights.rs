//! Giving up what of root's rights a command has no use for.

use std::io;

use godwit_confine::{Rights, keep, seal};

/// Gives up all capabilities but `rights`, for good; before any thread is started.
pub(crate) fn keep_only(rights: Rights) -> io::Result<()> {
    let given_up = seal().and_then(|()| keep(rights));
    given_up.map_err(|error| io::Error::other(format!("cannot give up rights of root's: {error}")))
}
