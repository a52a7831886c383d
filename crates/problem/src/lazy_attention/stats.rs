//! Statistics on the sparsity of weights that tiers report: (E37)–(E46).

/// Sparsity of the weights, over the visible pairs and the rows that have one. 0/0 counts as 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stats {
    /// Active pairs among the visible ones, (E37).
    pub element_density: f64,
    /// Tiles with an active pair among those with a visible one, (E38).
    pub tile_density: f64,
    /// The mean of Σ_j e_ij, (E39).
    pub surviving_mass: f64,
    /// The mean of the weight P of the inactive pairs of a row, (E40): what a backward pass loses
    /// that skips them.
    pub inactive_mass: f64,
    /// Rows without an active pair, (E41).
    pub dead_rows: f64,
    /// The mean of P_i1 over the rows that see more than one key, (E42).
    pub first_key_weight: f64,
    /// The mean of e_i1 over these rows, (E43).
    pub first_key_kept: f64,
    /// Σ_i e_i1 / Σ_ij e_ij over these rows, (E44).
    pub first_key_share: f64,
    /// Possible gain of a kernel that skips inactive tiles, (E45).
    pub by_tiles: SpeedUp,
    /// Possible gain of a kernel that skips inactive pairs, (E46).
    pub by_pairs: SpeedUp,
}

/// Products of matrices without skipping, over those with skipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpeedUp {
    /// In the forward pass.
    pub forward: f64,
    /// In the backward pass.
    pub backward: f64,
    /// In both together.
    pub both: f64,
    /// In both together, than softmax attention.
    pub over_attention: f64,
}

impl SpeedUp {
    /// (E45) and (E46), of a kernel whose forward pass takes `f + f_active ρ` products over all visible tiles,
    /// and its backward pass `b + b_active ρ`.
    pub fn new(
        visible: usize,
        [f, f_active]: [f64; 2],
        [b, b_active]: [f64; 2],
        density: f64,
    ) -> Self {
        /// Q Kᵀ and P V; then Q Kᵀ, dout Vᵀ and the three gradients.
        const ATTENTION: f64 = 2.0 + 5.0;
        if visible == 0 {
            return SpeedUp { forward: 0.0, backward: 0.0, both: 0.0, over_attention: 0.0 };
        }
        let (forward, backward) = (f + f_active * density, b + b_active * density);
        SpeedUp {
            forward: (f + f_active) / forward,
            backward: (b + b_active) / backward,
            both: (f + f_active + b + b_active) / (forward + backward),
            over_attention: ATTENTION / (forward + backward),
        }
    }
}
