//! What both sides of a session have of what one of them may do without.

use godwit_wire::Features;

use crate::compression::Codecs;

/// What both sides have.
#[derive(Clone, Copy, Default)]
pub(super) struct Common {
    pub(super) codecs: Codecs,
    pub(super) features: Features,
}
