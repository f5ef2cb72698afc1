// Questions to begin with: word problems as the quickstart's model has learned them, with two changes each, in its seven
// languages.
export const EXAMPLES = [
  ["en", "Tom has 3 apples. Tom buys 2 more. Tom finds 4 more. How many apples does Tom have now?"],
  ["fr", "Marie a 12 livres. Marie en donne 4. Marie en achète encore 3. Combien de livres a maintenant Marie ?"],
  ["de", "Greta hat 7 Münzen. Greta findet noch 5. Greta verliert 2 davon. Wie viele Münzen hat Greta jetzt?"],
  ["es", "Diego tiene 9 manzanas. Diego compra 3 más. Diego regala 1. ¿Cuántas manzanas tiene Diego ahora?"],
  ["it", "Luca ha 15 francobolli. Luca ne perde 2. Luca ne trova 4 in più. Quanti francobolli ha adesso Luca?"],
  ["ru", "У Олега есть монеты, всего 8. Олег получает ещё 4. Олег теряет 3. Сколько монет теперь у Олега?"],
  ["zh", "小明有10个苹果。小明送出了3个。小明又买了5个。小明现在有多少个苹果？"],
];
