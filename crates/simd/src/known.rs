//! Facts that follow from a problem and a pass before a tensor is seen.

use crate::Workspace;
use crate::tiles::check_counts;
use etalon_problem::{Axis, Error, Operand, Pass, Problem, Scores, Sequence, Table, TokenSequence};
use std::sync::Arc;

/// Facts that a workspace remembers of a sound problem and a pass: its tensors, and its sequences of queries
/// and keys, or of tokens.
pub(crate) struct Known {
    pub problem: Problem,
    pub pass: Pass,
    pub table: Table,
    pub sequences: Vec<Sequence>,
    pub tokens: Vec<TokenSequence>,
}

impl Known {
    pub fn of(workspace: &Workspace, problem: &Problem, pass: Pass) -> Result<Arc<Self>, Error> {
        let fits = |known: &Known| known.pass == pass && known.problem == *problem;
        workspace.remember(fits, || {
            let table = problem.checked_table(pass)?;
            check_counts(problem.extent(Axis::Batch), problem.extent(Axis::QueryHeads))?;
            let sequences = problem.scores().map(Scores::sequences).unwrap_or_default();
            let tokens = match problem {
                Problem::LinearAttention(problem) => problem.list_sequences(),
                _ => Vec::new(),
            };
            Ok(Known { problem: problem.clone(), pass, table, sequences, tokens })
        })
    }

    /// Its bytes, with the lists of a workspace and where its regions begin cache lines.
    pub fn bytes(&self) -> usize {
        const WORKSPACE: usize = 1024;
        let axis = size_of::<usize>() + size_of::<Axis>();
        let shapes = self.table.operands.iter().map(|operand| operand.shape.len() * axis);
        let operands = self.table.operands.capacity() * size_of::<Operand>();
        let sequences = size_of_val(&self.sequences[..]) + size_of_val(&self.tokens[..]);
        shapes.sum::<usize>() + operands + sequences + size_of::<Known>() + WORKSPACE
    }
}
