//! What the statistics of lazy attention say of a row.

/// The figures of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    Visible,
    Active,
    /// Σ e.
    Surviving,
    /// Σ P of the inactive pairs.
    Inactive,
    /// P and e of the first key of the sequence.
    FirstWeight,
    FirstKept,
}

impl Figure {
    /// How many there are. Behind them stands what is known of each tile of keys.
    pub const COUNT: usize = 6;
    /// A tile of keys in which a row sees a pair, and one in which a pair is active.
    pub const SEEN: f32 = 1.0;
    pub const FULL: f32 = 2.0;
}
