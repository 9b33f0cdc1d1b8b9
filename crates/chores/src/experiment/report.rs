//! Tables of what was measured, as Markdown. Pure.

/// A table with a title above and notes below.
#[derive(Debug)]
pub struct Report {
    title: String,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    notes: Vec<String>,
}

impl Report {
    /// One without rows.
    pub fn new(title: String, head: &[&str]) -> Report {
        let head = head.iter().map(|&name| name.to_owned()).collect();
        Report { title, head, rows: Vec::new(), notes: Vec::new() }
    }

    /// Adds a row, with a cell for every name of the head.
    pub fn row(&mut self, cells: &[String]) {
        assert_eq!(cells.len(), self.head.len(), "a row is as long as the head");
        self.rows.push(cells.to_vec());
    }

    /// Adds a paragraph below the table.
    pub fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }

    /// The table with its title and notes.
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let mut text = format!("# {}\n\n{}", self.title, line(&self.head));
        text += &line(&vec!["---".to_owned(); self.head.len()]);
        self.rows.iter().for_each(|row| text += &line(row));
        self.notes.iter().for_each(|note| text += &format!("\n{note}\n"));
        text
    }

    /// A page of its own, which says where it comes from and shows a chart.
    pub fn page(&self, command: &str, chart: &str) -> String {
        let title = &self.title;
        format!(
            "<!-- Written by `{command}`; changes by hand are lost with the next run. -->\n\n{}\n![{title}]({chart})\n",
            self.markdown()
        )
    }
}

/// A number for people: `1,234.5`.
pub fn number(value: f64, places: usize) -> String {
    let text = format!("{:.places$}", value.abs());
    let (whole, rest) =
        text.split_once('.').map_or((text.as_str(), None), |(whole, rest)| (whole, Some(rest)));
    let mut grouped = String::new();
    for (n, digit) in whole.chars().enumerate() {
        if n > 0 && (whole.len() - n) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    let sign = if value < 0.0 && text.chars().any(|c| matches!(c, '1'..='9')) { "−" } else { "" };
    rest.map_or_else(|| format!("{sign}{grouped}"), |rest| format!("{sign}{grouped}.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_table_its_notes_and_the_chart() {
        let mut report = Report::new("Two jobs".into(), &["", "gang"]);
        report.row(&["total".into(), "795".into()]);
        report.note("On a laptop.");
        let page = report.page("cargo xtask experiment sharing", "sharing-24.svg");
        assert_eq!(
            page,
            "<!-- Written by `cargo xtask experiment sharing`; changes by hand are lost with the next run. -->\n\n\
             # Two jobs\n\n|  | gang |\n| --- | --- |\n| total | 795 |\n\nOn a laptop.\n\n![Two jobs](sharing-24.svg)\n"
        );
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(number(1234567.891, 1), "1,234,567.9");
        assert_eq!(
            (number(580.0, 0).as_str(), number(-0.4, 0).as_str(), number(-12.0, 0).as_str()),
            ("580", "0", "−12")
        );
    }
}
