//! What stands for the store in builds without NATS: nobody has one.

use crate::EvacuateError;
use crate::nats::{NatsOptions, without_secrets};
use crate::store::{Lease, Store, Tenure, Wishes};

/// A store that cannot be had.
#[derive(Debug)]
pub enum NatsStore {}

impl NatsStore {
    /// Refuses.
    ///
    /// # Errors
    /// Always: this build has no NATS.
    pub fn connect(options: &NatsOptions) -> Result<Self, EvacuateError> {
        Err(EvacuateError::Store {
            place: without_secrets(&options.servers),
            action: "opened",
            why: "this godwit was built without NATS: build it with the feature `nats`".to_owned(),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn place(&self) -> &str {
        match *self {}
    }

    /// Who has the lease, and which renewal of it that is.
    ///
    /// # Errors
    /// None.
    pub fn holder(&self) -> Result<Option<(String, u64)>, EvacuateError> {
        match *self {}
    }
}

impl Store for NatsStore {
    fn read(&self, _: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
        match *self {}
    }

    fn put(&mut self, _: &str, _: &[u8]) -> Result<(), EvacuateError> {
        match *self {}
    }

    fn list(&self, _: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
        match *self {}
    }
}

impl Lease for NatsStore {
    fn take(&mut self) -> Result<Tenure, EvacuateError> {
        match *self {}
    }

    fn release(&mut self) {
        match *self {}
    }
}

impl Wishes for NatsStore {
    fn change(&self, _: &str, _: &dyn Fn(Option<&[u8]>) -> Vec<u8>) -> Result<(), EvacuateError> {
        match *self {}
    }
}
