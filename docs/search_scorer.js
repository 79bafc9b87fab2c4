// Scores of the search. Pages for people who change Rankbook come after those for its users.
// The numbers are Sphinx's own (themes/basic/static/searchtools.js).
const CONTRIBUTORS = /^(architecture|states|wire|contributing\/)/;
var Scorer = {
  score: ([page, , , , score]) => (CONTRIBUTORS.test(page) ? score / 10 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
