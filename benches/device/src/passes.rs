//! The passes that are prepared, by number.

use crate::request::{Failure, Prepared};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All that were prepared and not forgotten, and the number of the last.
pub struct Passes(Mutex<(u64, BTreeMap<u64, Arc<Prepared>>)>);

/// The passes of the process.
pub static PASSES: Passes = Passes(Mutex::new((0, BTreeMap::new())));

impl Passes {
    /// Its number, from 1 on: none is given twice.
    pub fn add(&self, pass: Prepared) -> u64 {
        let mut held = self.held();
        held.0 += 1;
        let number = held.0;
        held.1.insert(number, Arc::new(pass));
        number
    }

    pub fn get(&self, number: u64) -> Result<Arc<Prepared>, Failure> {
        self.held().1.get(&number).cloned().ok_or_else(|| unknown(number))
    }

    pub fn remove(&self, number: u64) -> Result<(), Failure> {
        let removed = self.held().1.remove(&number); // and dropped without the lock
        removed.map(drop).ok_or_else(|| unknown(number))
    }

    fn held(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Arc<Prepared>>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(number: u64) -> Failure {
    Failure(format!("there is no pass {number}"))
}
