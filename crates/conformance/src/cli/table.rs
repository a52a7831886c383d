//! Tables for a terminal.

use comfy_table::{ContentArrangement, LineStyle, Table, TableStyle};

const LINE: LineStyle = LineStyle::none().fill('─').junction('─');

/// One line under the header and one around the rows; none between them.
const STYLE: TableStyle =
    TableStyle::new().top_border(LINE).header_separator(LINE).bottom_border(LINE);

/// An empty table with this header, as wide as its content or the terminal.
pub fn table(header: &[impl ToString]) -> Table {
    let mut table = Table::new();
    table
        .load_style(STYLE)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(header.iter().map(ToString::to_string));
    table
}
